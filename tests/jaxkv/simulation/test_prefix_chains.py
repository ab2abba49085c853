"""The cache of counted prefixes equals the engine's, and a plain loop over pages."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling, simulation
from jaxkv.memory import FIFO, linear_eviction
from jaxkv.scheduling import linear_score
from jaxkv.simulation import Capacity, SimulationMember, counted_pages
from jaxkv.simulation.counted_pages import PrefixChains
from jaxkv.verification import find_difference, replay_chains
from jaxkv.workloads import make_workload
from tests.support.simulations import COST

RULES = {
    "lru": (scheduling.fcfs(), None),
    "young first": (
        linear_score(admission={"younger": 1.0, "cached_tokens": -0.3}, chunk_size=7),
        linear_eviction(recency=0.0, session_ms=1000),
    ),
    "mixed": (
        scheduling.vllm_scheduler(rule="vllm-0.19"),
        linear_eviction(recency=0.5, priority_ms=70, page_ms=-30, session_ms=-9),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_steps_equal_those_of_the_engine(name: str, seed: int) -> None:
    policy, rule = RULES[name]
    run = replay_chains(policy, rule, seed=seed)
    assert find_difference(run.steps, run.replay) is None
    assert run.steps.num_preempted.sum() > 0
    cache = run.replay.state.prefixes
    assert cache is not None
    assert run.simulation.prefixes is not None
    assert int(run.simulation.prefixes.idle.sum()) == int(cache.idle.num)
    # Some turns found their prefix, and some had lost a part of it.
    w = run.workload
    before = np.asarray(w.after)[:, 0]
    context = np.where(before >= 0, np.asarray(w.prompt + w.output)[before], 0)
    num_cached = int(run.replay.state.sequences.num_cached.sum())
    assert 0 < num_cached < (np.maximum(context - 1, 0) // 4 * 4).sum()


def evict_page_by_page(idle: list[int], rank: list[int], num: int) -> list[int]:
    """The deepest page of the lowest rank, `num` times."""
    idle = idle.copy()
    for _ in range(min(num, sum(idle))):
        chains = [i for i, pages in enumerate(idle) if pages]
        first = min(chains, key=lambda i: (rank[i], -idle[i], i))
        idle[first] -= 1
    return idle


def test_eviction_equals_a_loop_over_pages() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        idle = rng.integers(0, 6, 7).tolist()
        rank = rng.integers(-2, 2, 7).tolist()
        num = int(rng.integers(0, 30))
        cache = PrefixChains(
            jnp.asarray(idle, "int32"), jnp.asarray(rank, "int32"), jnp.int32(0)
        )
        left = counted_pages.evict_chains(cache, jnp.int32(num))
        assert left.idle.tolist() == evict_page_by_page(idle, rank, num)


def test_wrong_chains_and_rules_are_refused() -> None:
    after = np.array([[-1], [0]])
    prompt = np.array([3, 5])
    output = np.array([2, 1])
    make: Any = inspect.unwrap(make_workload)
    for arguments, line in (
        ({"after": after}, r"request 1: has prompt=5, not above its chain's tokens"),
        ({}, "must be after the request before it in chain 0"),
        ({"samples": 2, "after": after}, "has samples=2, which must be 1"),
        ({"context": np.zeros(2, int), "after": after}, "context must be None"),
    ):
        with pytest.raises(ValueError, match=line):
            make(np.zeros(2), prompt, output, chain=np.zeros(2, int), **arguments)
    w = make_workload(np.zeros(2), prompt + 1, output, chain=np.arange(2))
    capacity = Capacity.of(num_pages=8)
    member = SimulationMember(w, capacity, scheduling.fcfs(), COST, None, None, FIFO())
    with pytest.raises(ValueError, match="eviction=FIFO must be LRU or LinearEviction"):
        simulation.simulate(simulation.stack([member]), max_slots=2)
    with pytest.raises(ValueError, match="must be 1 with chains"):
        simulation.init_simulation(
            w, capacity, scheduling.fcfs(), max_slots=2, max_samples=2
        )
    with pytest.raises(ValueError, match=r"page_ms=10001 must be in \[-10000, 10000\]"):
        linear_eviction(page_ms=10_001)
