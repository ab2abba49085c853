"""Workloads and costs for simulations, and comparison with the engine."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import clock, scheduling
from jaxkv.engine import EngineConfig, EngineState, Speculation
from jaxkv.memory import EvictionRule, WindowLayers, make_pages
from jaxkv.models import ForwardResult
from jaxkv.scheduling import NO_LIMIT, Policy, RequestAttributes
from jaxkv.simulation import Acceptance, state, step
from jaxkv.verification import (
    EngineReplay,
    engine_requests,
    find_difference,
    replay_in_engine,
)
from jaxkv.workloads import Workload


class Cost(NamedTuple):
    """Cost of a step in s: a constant, plus a term for its work."""

    base: jax.Array

    def __call__(self, work: step.Work) -> jax.Array:
        rows = work.num_prompt_rows + work.num_swapped
        return self.base * (1.0 + 0.01 * rows.astype(jnp.float32))


COST = Cost(jnp.float32(0.01))


run_simulation = jax.jit(
    step.simulate_steps,
    static_argnames=("num_steps", "max_samples", "head"),
)


def workload(
    seed: int, num: int, *, max_samples: int = 1, rate: float = 200.0, longest: int = 30
) -> Workload:
    """Requests of up to `longest` prompt and answer tokens, some arriving together."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, num))
    arrival[:3] = 0

    def draw(limit: int) -> jax.Array:
        return jnp.asarray(rng.integers(1, limit + 1, num), jnp.int32)

    prompt = draw(longest)
    output = draw(longest)
    return Workload(
        arrival=jnp.asarray(clock.from_seconds(arrival)),
        prompt=prompt,
        output=output,
        samples=draw(max_samples),
        clients=jnp.int32(NO_LIMIT),
    )


def dependencies(seed: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Random sessions: chains, fan-out and joins, some delays 0 and many equal.

    Returns:
      `after`, of shape [num, 3], and delays in microseconds.
    """
    rng = np.random.default_rng(seed)
    after = np.full((num, 3), -1)
    for i in range(1, num):
        if rng.random() < 0.8:
            recent = np.arange(max(0, i - 8), i)
            size = min(recent.size, int(rng.integers(1, 4)))
            after[i, :size] = rng.choice(recent, size, replace=False)
    delay_us = rng.choice([0, 0, 10_000, 40_000, 123_457], num)
    return after, np.where(after[:, 0] < 0, 0, delay_us)


VOCAB = 4099
"""Large enough that two sequences rarely sample the same token."""


def forward(params: Any, pages: Any, rows: Any) -> ForwardResult:
    """A model with equal logits."""
    return ForwardResult(jnp.zeros((rows.logit_rows.shape[0], VOCAB)), pages)


def with_attributes(w: Workload, seed: int) -> Workload:
    """Adds limits and random attributes to a workload; some keep the defaults."""
    rng = np.random.default_rng(seed)
    num = w.prompt.shape[0]

    def draw_column(low: int, high: int, default: int) -> jax.Array:
        numbers = rng.integers(low, high, num)
        return jnp.asarray(np.where(rng.random(num) < 0.3, default, numbers), jnp.int32)

    default: Any = RequestAttributes()
    return w._replace(
        limit=w.prompt + w.output,
        attributes=RequestAttributes(
            arrival_ms=jnp.zeros((num,), jnp.int32),
            priority=draw_column(-3, 4, default.priority),
            deadline_ms=draw_column(0, 900, default.deadline_ms),
            session=draw_column(0, 4, default.session),
            predicted_length=draw_column(1, 60, default.predicted_length),
        ),
    )


class Case(NamedTuple):
    """A policy, and bounds under which its rules apply."""

    policy: Policy
    max_samples: int = 1
    num_pages: int = 22
    max_swap_pages: int = 0
    head: int | None = None
    window: int | None = None
    evict: EvictionRule | None = None
    evict_budget: int = 0


CASES = {
    "plain": Case(scheduling.fcfs(chunk_size=7, watermark=2)),
    "swap": Case(
        scheduling.fcfs(preemption="swap", hold_new=False, victim="fewest_pages"),
        max_swap_pages=20,
    ),
    "static": Case(scheduling.static(), num_pages=70),
    "vllm": Case(
        scheduling.vllm_scheduler(max_num_seqs=7, long_prefill_token_threshold=9)
    ),
    "groups": Case(scheduling.fcfs(), max_samples=3, num_pages=42),
    "groups, swap": Case(
        scheduling.fcfs(
            chunk_size=3, preemption="swap", hold_new=False, victim="cheapest"
        ),
        max_samples=3,
        num_pages=42,
        max_swap_pages=30,
    ),
    "groups, static": Case(scheduling.static(), max_samples=3, num_pages=80),
}


BY_ATTRIBUTES = {
    "shortest remaining": Case(scheduling.shortest_remaining(), head=20),
    "ageing priority": Case(
        scheduling.ageing_priority(
            level_ms=40, inner=scheduling.fcfs(victim="least_urgent")
        ),
        head=20,
    ),
    "earliest deadline": Case(
        scheduling.earliest_deadline(), max_samples=3, num_pages=42, head=14
    ),
    "fair share": Case(scheduling.fair_share(), max_samples=3, num_pages=42, head=5),
    "longest remaining goes": Case(
        scheduling.fcfs(victim="longest_remaining", preemption="swap"),
        max_swap_pages=20,
    ),
}
"""Cases of policies that read request attributes."""


class EngineComparison(NamedTuple):
    """A simulation and an engine that served the same workload."""

    simulation: state.Simulation
    infos: Any
    """Steps of the simulation."""
    replay: EngineReplay

    @property
    def engine(self) -> EngineState:
        return self.replay.state


def compare_with_engine(
    w: Workload,
    case: Case,
    seed: int,
    *,
    acceptance: Acceptance | None = None,
    speculation: Speculation | None = None,
) -> EngineComparison:
    """Runs a simulation to its end, and an engine with the same clock."""
    num = w.prompt.shape[0] * case.max_samples
    config = EngineConfig(
        num_pages=case.num_pages,
        page_size=4,
        max_slots=9,
        max_length=60,
        max_sequences=num,
        queue_capacity=num,
        token_budget=24,
        submit_width=num,
        max_swap_pages=case.max_swap_pages,
        queue_head=case.head or 0,
        max_stop_tokens=1,
        max_drafts=0 if acceptance is None else acceptance.chances.shape[0],
        release_window_pages=case.window is not None,
        evict=case.evict,
        evict_budget=case.evict_budget,
        debug=True,
    )
    bounds = capacity(config, case.window)
    simulated_state = state.init_simulation(
        w,
        bounds,
        case.policy,
        max_slots=config.max_slots,
        max_samples=case.max_samples,
        head=case.head,
    )
    infos = []
    while int(simulated_state.num_done) < int(simulated_state.num_served):
        simulated_state, call_infos = run_simulation(
            simulated_state,
            w,
            capacity=bounds,
            policy=case.policy,
            cost=COST,
            num_steps=64,
            max_samples=case.max_samples,
            head=case.head,
            acceptance=acceptance,
        )
        infos.append(jax.tree.map(np.asarray, call_infos))
    windowed = None
    if case.window is not None:
        num_pages = config.num_window_pages(case.window)
        windowed = WindowLayers(1, num_pages, case.window)
    pages = make_pages(
        num_layers=1,
        num_pages=config.num_pages,
        num_kv_heads=1,
        page_size=config.page_size,
        head_dim=1,
        dtype="float32",
        windowed=windowed,
    )
    replay = replay_in_engine(
        w,
        infos,
        case.policy,
        config,
        requests=engine_requests(w, config, seed=seed, vocab_size=VOCAB),
        model=(None, forward, pages),
        speculation=speculation,
    )
    joined = jax.tree.map(lambda *x: np.concatenate(x), *infos)
    return EngineComparison(simulated_state, joined, replay)


def assert_equal_steps(run: EngineComparison) -> None:
    """Asserts that both have equal steps."""
    assert find_difference(run.infos, run.replay) is None


def capacity(config: EngineConfig, window: int | None = None) -> state.Capacity:
    bounds = state.Capacity.of(
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_length=config.max_length,
        token_budget=config.token_budget,
        max_swap_pages=config.max_swap_pages,
        window=window,
    )
    if config.evict is None:
        return bounds
    return bounds.with_eviction(config.evict, config.evict_budget)
