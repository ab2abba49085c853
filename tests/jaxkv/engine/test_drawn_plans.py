"""Drawn plans in the engine and the simulator: no hang, and no other token.

A plan with drawn values delays requests at most. When the drawn values make no more
progress, the same program continues with plain plans, and every request must end with
the tokens of first come, first served.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.engine import Speculation
from jaxkv.models import PagedForward
from jaxkv.sampling import Sampling
from jaxkv.speculation import NGram, SharedNoiseVerifier
from tests.support import engines
from tests.support.drawn_plans import DrawnPlan, draw_plan
from tests.support.engines import MODEL, ROOMY, Ask

CONFIGS = {
    "shared": (dataclasses.replace(ROOMY, num_pages=30, prefix_cache=True), None),
    "tight": (
        dataclasses.replace(
            ROOMY, num_pages=24, max_slots=5, max_swap_pages=8, max_beams=2
        ),
        None,
    ),
    "drafts": (
        dataclasses.replace(ROOMY, num_pages=20, prefix_cache=True, max_drafts=2),
        Speculation(NGram(1, 2), SharedNoiseVerifier()),
    ),
}
"""Few configurations, each of which is compiled once for all plans."""


def asks(name: str) -> list[Ask]:
    rng = np.random.default_rng(3)
    answers: list[dict[str, Any]] = [
        dict(n=3, temperature=1.0, seed=1),
        dict(temperature=0.0),
        dict(temperature=0.9, logprobs=1, prompt_logprobs=True),
        dict(n=2, temperature=0.0),
        dict(temperature=0.7, seed=2),
    ]
    if name == "tight":
        answers[1] = dict(beam_width=2)
    shared = rng.integers(0, MODEL.vocab_size, 8).tolist()
    return [
        Ask(
            100 + i,
            shared[: 8 * (i % 2)]
            + rng.integers(0, MODEL.vocab_size, 3 + 4 * i).tolist(),
            Sampling(max_tokens=6 + i, **fields),
        )
        for i, fields in enumerate(answers)
    ]


def serve(
    name: str, policy: DrawnPlan, *, max_calls: int = 60
) -> tuple[dict[Any, list[int]], dict[Any, np.ndarray]]:
    """Serves the requests; returns tokens, and log-probabilities of answers."""
    config, speculation = CONFIGS[name]
    plain = policy._replace(replaces=jnp.zeros_like(policy.replaces))
    weights = engines.params()
    waiting = asks(name)
    num = len(engines.names_of(waiting))
    outcomes = {}
    state = engines.start(config, speculation=speculation)
    extra: Any = {} if speculation is None else {"speculation": speculation}
    for call in range(10 * max_calls):
        if len(outcomes) == num:
            break
        if waiting:
            batch = engines.batch_of(waiting, config)
            state, taken = engines.submit(
                state, engines.requests_of(batch, config), config=config
            )
            begun = engines.requests_of(batch, config).params.sample == 0
            waiting = waiting[int((np.asarray(taken) & begun).sum()) :]
        state, info = engines.run_steps(
            weights,
            state,
            jnp.zeros(2, jnp.int32),
            config=config,
            forward=PagedForward(MODEL, config.numerics),
            policy=policy if call < max_calls else plain,
            **extra,
        )
        for rule, counts in info.violations._asdict().items():
            assert not np.asarray(counts).any(), rule
        state, drained = engines.drain(state)
        outcomes |= engines.outcomes_of(drained)
    assert len(outcomes) == num, f"{num - len(outcomes)} answers are lost"
    engines.assert_empty(state)
    tokens = {key: outcome.tokens for key, outcome in outcomes.items()}
    return tokens, {key: outcome.logprobs for key, outcome in outcomes.items()}


@functools.cache
def expected(name: str) -> tuple[dict[Any, list[int]], dict[Any, np.ndarray]]:
    policy = plan_of(name, 0)
    return serve(name, policy._replace(replaces=jnp.zeros_like(policy.replaces)))


def plan_of(name: str, seed: int) -> DrawnPlan:
    config, _ = CONFIGS[name]
    inner = scheduling.fcfs(preemption="swap" if config.max_swap_pages else "recompute")
    return draw_plan(seed, config.max_slots, inner)


def check_engine(name: str, seed: int) -> None:
    tokens, logprobs = serve(name, plan_of(name, seed))
    wanted, scores = expected(name)
    assert tokens == wanted, seed
    for key, values in scores.items():
        np.testing.assert_allclose(logprobs[key], values, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_drawn_plans_change_no_token(name: str) -> None:
    for seed in range(12):
        check_engine(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_thousands_of_drawn_plans_change_no_token(name: str) -> None:
    for seed in range(100, 1100):
        check_engine(name, seed)
