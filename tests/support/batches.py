"""Engines that serve one workload with different batches and equal bits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv import scheduling
from jaxkv.engine import EngineConfig
from tests.support import engines
from tests.support.engines import MODEL, Ask, Outcome, Run, pages_of


class EngineSetting(NamedTuple):
    """Static bounds of an engine and parameters of its policy."""

    max_slots: int
    page_size: int
    num_pages: int
    token_budget: int
    chunk_size: int | None
    prefix_cache: bool
    max_swap_pages: int = 0
    victim: Any = "latest"


# Sequences have at most 63 tokens. Pools of this size force preemptions if there are
# several slots; a tile of 64 rows has 3 % to 100 % of a step.
SETTINGS = {
    "8 slots": EngineSetting(8, 4, 16, 40, 8, False),
    "1 slot": EngineSetting(1, 16, 4, 24, None, False),
    "small budget": EngineSetting(3, 64, 3, 3, 32, False),
    "large budget": EngineSetting(8, 16, 6, 200, None, True, 5, "fewest_pages"),
    "small pool": EngineSetting(3, 4, 17, 70, 32, True, 20, "cheapest"),
    "small pool, no swap": EngineSetting(3, 4, 17, 70, 32, False, 0, "least_computed"),
    "pages of one token": EngineSetting(3, 1, 120, 64, 8, True),
    "large pool": EngineSetting(8, 64, 8, 64, 32, False),
    "1 slot, 1 token": EngineSetting(1, 4, 16, 1, 8, True),
}


QUICK = ("8 slots", "1 slot", "large budget")


AT_LEAST_3_SLOTS = tuple(name for name in SETTINGS if SETTINGS[name].max_slots >= 3)


def config_of(setting: EngineSetting, numerics: Any = "reproducible") -> EngineConfig:
    return EngineConfig(
        num_pages=setting.num_pages,
        page_size=setting.page_size,
        max_slots=setting.max_slots,
        max_length=MODEL.max_positions,
        max_sequences=16,
        queue_capacity=16,
        token_budget=setting.token_budget,
        max_logit_rows=setting.max_slots + 5,
        max_stop_tokens=2,
        max_logprobs=2,
        prefix_cache=setting.prefix_cache,
        max_swap_pages=setting.max_swap_pages,
        submit_width=16,
        steps_per_call=8,
        numerics=numerics,
        seed=12345,
        debug=True,
    )


def workload(seed: int) -> list[Ask]:
    return engines.random_asks(np.random.default_rng([seed, 1]), 10, scores=True)


def groups(seed: int) -> list[Ask]:
    """Requests with up to three answers, most with one of two prefixes."""
    rng = np.random.default_rng([seed, 2])
    texts = rng.integers(0, MODEL.vocab_size, (2, 20)).tolist()
    asks = []
    for ask in engines.random_asks(
        rng, 16, max_prompt=10, max_answer=14, scores=True, max_n=3
    ):
        begin = texts[rng.integers(2)][: rng.integers(12, 21)]
        asks.append(ask._replace(prompt=begin + ask.prompt))
    settings = [SETTINGS[name] for name in AT_LEAST_3_SLOTS]
    return [ask for ask in asks if all(fits(ask, setting) for setting in settings)]


def fits(ask: Ask, setting: EngineSetting) -> bool:
    """Returns True if the worst case of a request fits into an engine."""
    return pages_of(ask, setting.page_size) <= setting.num_pages


def serve(
    asks: Sequence[Ask],
    setting: EngineSetting,
    seed: int,
    numerics: str = "reproducible",
    *,
    config: EngineConfig | None = None,
    **how: Any,
) -> Run:
    """Serves a workload in the order and with the arrivals of a setting.

    A `config` replaces that of the setting; `how` are arguments of `engines.serve`.
    """
    how = {"as_served": True, "weights": weights_served()} | how
    rng = np.random.default_rng([seed, setting.max_slots, setting.page_size])
    arrivals = np.sort(rng.uniform(0, 0.2, len(asks)))
    order = rng.permutation(len(asks))
    arriving = [
        asks[index]._replace(arrival_s=arrival_s)
        for index, arrival_s in zip(order.tolist(), arrivals.tolist(), strict=True)
    ]
    return engines.serve(
        arriving,
        config_of(setting, numerics) if config is None else config,
        scheduling.fcfs(
            chunk_size=setting.chunk_size,
            victim=setting.victim,
            preemption="swap" if setting.max_swap_pages else "recompute",
            hold_new=False,
            cached_first=setting.prefix_cache,
        ),
        step_s=0.05,
        **how,
    )


def weights_served() -> Any:
    """Parameters of the model in the widest available type."""
    return engines.params(MODEL, "float64" if jax.config.x64_enabled else "float32")


def assert_same_bits(a: Outcome, b: Outcome) -> None:
    """Asserts equal outcomes, times and recomputation excluded."""
    for name in ("tokens", "reason", "logprobs", "prompt_logprobs", "top_ids"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
    np.testing.assert_array_equal(a.top_logprobs, b.top_logprobs)


def check_workloads(
    seeds: Sequence[int],
    names: Sequence[str],
    make: Callable[[int], list[Ask]] = workload,
) -> dict[str, int]:
    """Serves every workload at every setting; returns the number of preemptions."""
    num_preempted = dict.fromkeys(names, 0)
    for seed in seeds:
        asks = make(seed)
        first: dict[int, Outcome] = {}
        for name in names:
            run = serve(asks, SETTINGS[name], seed)
            num_preempted[name] += int(run.info.num_preempted.sum())
            first = first or run.outcomes
            assert len(first) == len(run.outcomes)
            for request_id, outcome in run.outcomes.items():
                assert_same_bits(outcome, first[request_id])
    return num_preempted
