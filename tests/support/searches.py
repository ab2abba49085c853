"""Beam searches of golden models in the engine."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.engine import EngineConfig
from jaxkv.models import load_model
from jaxkv.sampling import Sampling
from jaxkv.scheduling import FCFS, Counts, Plan
from tests.support import engines
from tests.support.engines import Ask, Run
from tests.support.folders import GOLDEN

EXPECTED = np.load(GOLDEN / "beams.npz")


LIMIT = 16


ROOMY = dataclasses.replace(
    engines.TIGHT,
    num_pages=64,
    max_slots=12,
    max_sequences=48,
    queue_capacity=40,
    token_budget=16,
    max_logit_rows=0,
    max_logprobs=0,
    max_beams=6,
    prefix_cache=True,
    submit_width=12,
)
RULES = (False, True, "never")
TIGHT = dataclasses.replace(ROOMY, num_pages=31)


@functools.cache
def asks(name: str) -> tuple[Ask, ...]:
    """All searches of the golden file, mixed with sampled requests."""
    prompt, stops = (EXPECTED[f"{name}_{part}"] for part in ("prompt", "stops"))
    requests = []
    for i, (width, penalty, rule) in enumerate(EXPECTED["settings"].tolist()):
        sampling = Sampling(
            beam_width=int(width),
            n=int(width),
            length_penalty=penalty,
            early_stopping=RULES[int(rule)],
            stop_tokens=tuple(int(stop) for stop in stops if stop >= 0),
            max_tokens=LIMIT,
        )
        requests.append(Ask(i, prompt.tolist(), sampling))
        others = Sampling(n=1 + i % 3, max_tokens=5 + i % 7, seed=i)
        requests.append(Ask(100 + i, prompt.tolist()[: 1 + i % 9], others))
    return tuple(requests)


def serve(name: str, config: EngineConfig, num: int = 54, **fields: Any) -> Run:
    loaded = load_model(GOLDEN / name)
    return engines.serve(
        asks(name)[:num], config, model=loaded.config, weights=loaded.params, **fields
    )


def check(name: str, run: Run, num: int = 54) -> None:
    tokens, scores = (EXPECTED[f"{name}_{part}"] for part in ("tokens", "scores"))
    for ask in asks(name)[:num:2]:
        i = ask.request_id
        for beam, answer in enumerate(engines.names_of([ask])):
            want = [int(token) for token in tokens[i, beam] if token >= 0]
            assert run.tokens[answer] == want, (i, beam)
            assert run.outcomes[answer].score == pytest.approx(
                float(scores[i, beam]), abs=1e-4
            )


class SimulatedShortage(NamedTuple):
    """First come, first served, with a simulated shortage of pages every few steps.

    Preempted requests are swapped out if there is room for their pages.
    """

    num_missing: jax.Array
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        age = jnp.sum(counts.length, dtype=jnp.int32) % 5
        held = jnp.sum(counts.owned_pages, dtype=jnp.int32)
        missing = jnp.where(age == 0, self.num_missing + held // 3, 0)
        free = counts.free_pages - missing
        return self.fcfs().plan(counts._replace(free_pages=free))

    def fcfs(self) -> FCFS:
        return scheduling.fcfs(chunk_size=3, preemption="swap", hold_new=False)


MOODY = SimulatedShortage(jnp.asarray(4, jnp.int32))
