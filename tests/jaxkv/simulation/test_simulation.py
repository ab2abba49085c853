"""The simulation has the schedule of the engine, step for step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock as jaxkv_clock
from jaxkv import ledger, scheduling
from jaxkv.clock import from_seconds, to_seconds
from jaxkv.ledger import EVENTS, PROGRESS, SequenceEvents
from jaxkv.scheduling import NO_LIMIT, Policy
from jaxkv.simulation import Capacity, Simulation, apply_plan, counted_pages
from jaxkv.simulation import step as simulation_step
from jaxkv.workloads import Workload
from tests.support import mutation
from tests.support.mutation import Bug
from tests.support.simulations import (
    BY_ATTRIBUTES,
    CASES,
    COST,
    Case,
    Cost,
    assert_equal_steps,
    compare_with_engine,
    with_attributes,
    workload,
)


def events(state: Simulation) -> SequenceEvents:
    return EVENTS.unpack(np.asarray(state.ledger.events))


def seeds(*quick: str) -> list[Any]:
    """One seed of some cases in the quick suite, many seeds of all in the slow one."""
    slow = pytest.mark.slow
    first = [
        pytest.param(name, 10, marks=[] if name in quick else [slow]) for name in CASES
    ]
    return [
        *first,
        *(
            pytest.param(name, seed, marks=[slow])
            for name in CASES
            for seed in range(11, 20)
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [(name, 30) for name in BY_ATTRIBUTES])
def test_policies_see_the_same_attributes_in_the_engine(name: str, seed: int) -> None:
    """With queue heads above and below the number of slots, and preemption rules."""
    case = BY_ATTRIBUTES[name]
    w = with_attributes(workload(seed, 40, max_samples=case.max_samples), seed)
    run = compare_with_engine(w, case, seed)
    assert_equal_steps(run)
    # Without the attributes, at least one step would differ.
    plain = compare_with_engine(
        w._replace(attributes=None, limit=None), case, seed
    ).infos
    ours = run.infos.num_admitted, run.infos.num_preempted
    plain_counts = plain.num_admitted, plain.num_preempted
    assert any(
        not np.array_equal(x, y) for x, y in zip(ours, plain_counts, strict=True)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "seed"), seeds("groups, swap"))
def test_it_schedules_as_the_engine(name: str, seed: int) -> None:
    case = CASES[name]
    num = 30
    w = workload(seed, num, max_samples=case.max_samples)
    samples = np.asarray(w.samples)
    run = compare_with_engine(w, case, seed)
    assert_equal_steps(run)
    at = [r * case.max_samples + i for r in range(num) for i in range(samples[r])]
    assert int(run.simulation.num_served) == num
    noted, engine_events = (
        EVENTS.unpack(np.asarray(x.ledger.events)) for x in (run.simulation, run.engine)
    )
    np.testing.assert_array_equal(
        noted.num_recomputed[at], engine_events.num_recomputed[: len(at)]
    )
    times, their_times = (
        PROGRESS.read(np.asarray(x.ledger.progress), "num_preempted")
        for x in (run.simulation, run.engine)
    )
    np.testing.assert_array_equal(times[at], their_times[: len(at)])
    assert (times.sum() > 0) == (name not in ("static", "groups, static"))
    assert (run.infos.work.num_swapped.sum() > 0) == (case.max_swap_pages > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "max_samples", "num_pages"),
    [(9, 3, 42), (6, 1, 22), (1, 3, 42)],
)
def test_windows_return_pages_as_in_the_engine(
    window: int, max_samples: int, num_pages: int
) -> None:
    case = Case(
        scheduling.fcfs(chunk_size=7),
        max_samples=max_samples,
        num_pages=num_pages,
        window=window,
    )
    run = compare_with_engine(workload(3, 30, max_samples=max_samples), case, 3)
    assert_equal_steps(run)
    infos = run.infos
    assert infos.used_window_pages.sum() < 0.8 * infos.used_pages.sum()
    assert infos.num_preempted.sum() > 0
    assert run.engine.windows is not None
    assert not run.engine.windows.pool.ref.any()


def simulate(
    w: Workload,
    bounds: Capacity,
    policy: Policy,
    cost: Cost = COST,
    num_steps: int = 400,
) -> tuple[Simulation, simulation_step.SimulatedStep]:
    state = simulation_step.init_simulation(w, bounds, policy, max_slots=6)
    return simulation_step.simulate_steps(
        state, w, capacity=bounds, policy=policy, cost=cost, num_steps=num_steps
    )


run = jax.jit(simulate)
"""Requests of each workload, the same in all tests, so that they share a program."""

RULE = scheduling.fcfs(stackable=True)

BOUNDS = Capacity(*(jnp.int32(x) for x in (22, 4, 60, 24, 0)))


@pytest.mark.thorough
def test_a_mapped_run_equals_a_single_run() -> None:
    """Mapped over rates, seeds, numbers and sizes of pages, and policy parameters."""
    loads = [workload(seed, 12, rate=50.0 + 100 * seed) for seed in range(4)]
    bounds = [
        BOUNDS._replace(num_pages=jnp.int32(pages), page_size=jnp.int32(size))
        for pages, size in ((22, 4), (44, 2), (90, 1), (10, 8))
    ]
    rules = [
        scheduling.fcfs(watermark=mark, victim=victim, stackable=True)
        for mark, victim in (
            (0, "latest"),
            (2, "cheapest"),
            (0, "fewest_pages"),
            (1, "latest"),
        )
    ]
    costs = [Cost(jnp.float32(0.01 * (1 + i))) for i in range(4)]
    members = list(zip(loads, bounds, rules, costs, strict=True))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    together = jax.jit(jax.vmap(simulate))(*stacked)
    num_preempted = 0
    for i, member in enumerate(members):
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_array_equal(x[i], y),
            together,
            run(*member),
        )
        num_preempted += int(together[1].num_preempted[i].sum())
    assert num_preempted > 0


def test_idle_time_is_skipped_and_the_clock_stays_exact_for_days() -> None:
    days = np.arange(12) * 0.25 * 86_400 + 1e-6
    w = workload(0, 12)._replace(
        arrival=jnp.asarray(from_seconds(days)),
        prompt=jnp.full(12, 5, jnp.int32),
        output=jnp.full(12, 3, jnp.int32),
    )
    state, infos = run(w, BOUNDS, RULE)
    assert int(state.num_done) == 12
    assert int((infos.micros > 0).sum()) == 36  # three tokens of each
    noted = events(state)
    finish = np.stack([noted.finish_s - 1, noted.finish_us], axis=1)
    took = to_seconds(finish) - days
    np.testing.assert_allclose(took, 0.01 * (1.05 + 1 + 1), atol=2e-6)


def test_a_closed_loop_holds_as_many_requests_as_it_has_clients() -> None:
    w = workload(1, 12)._replace(
        arrival=jnp.zeros((12, 2), jnp.int32), clients=jnp.int32(3)
    )
    state, infos = run(w, BOUNDS._replace(num_pages=jnp.int32(1000)), RULE)
    assert int(state.num_done) == 12
    in_system = np.asarray(infos.num_running + infos.num_waiting)
    assert in_system.max() == 3
    assert int(infos.num_running.max()) == 3
    assert int(infos.num_waiting.min()) == 0
    # No client is idle while requests remain.
    done = np.cumsum(np.asarray(infos.num_finished))
    assert (in_system[1:][done[:-1] <= 12 - 3] == 3).all()


@pytest.mark.parametrize("clients", [None, 9])
def test_all_arrived_requests_are_counted_as_waiting(clients: int | None) -> None:
    # The policy sees the first six; all requests arrive together, or most of them.
    for arrival_s in (np.zeros(12), np.repeat([0.0, 0.05, 0.3, 9.0], [2, 8, 1, 1])):
        w = workload(4, 12)._replace(
            arrival=jnp.asarray(from_seconds(arrival_s)),
            prompt=jnp.asarray([5] * 11 + [70], jnp.int32),  # the last can never fit
            clients=jnp.int32(clients or NO_LIMIT),
        )
        _, infos = run(w, BOUNDS, RULE)
        done = np.cumsum(infos.num_finished) - infos.num_finished
        start_s = to_seconds(np.asarray(infos.start))
        come = np.sum(arrival_s[None, :11] <= start_s[:, None] + 1e-9, axis=1)
        come = np.minimum(come, done + (clients or 12))
        np.testing.assert_array_equal(
            infos.num_waiting, come - infos.num_running - done
        )
        if not arrival_s.any():
            assert infos.num_waiting[0] + infos.num_running[0] == (clients or 11)


def test_requests_that_can_never_fit_are_rejected() -> None:
    w = workload(2, 12)._replace(
        prompt=jnp.asarray([5, 70, 5, 40] * 3, jnp.int32),
        output=jnp.asarray([5, 5, 5, 10] * 3, jnp.int32),
    )
    state, _ = run(w, BOUNDS._replace(num_pages=jnp.int32(11)), RULE)
    assert int(state.num_served) == 6
    assert int(state.num_done) == 6
    assert (events(state).finish_s > 0).tolist() == [True, False, True, False] * 3


def test_places_are_divided_by_their_use() -> None:
    """A request of 6 + 4 tokens on pages of 4 tokens, its prompt in two chunks."""
    w = workload(0, 12)._replace(
        arrival=jnp.asarray(from_seconds(np.arange(12) * 10.0)),
        prompt=jnp.full(12, 6, jnp.int32),
        output=jnp.full(12, 4, jnp.int32),
    )
    _, infos = run(w, BOUNDS, RULE._replace(chunk_size=jnp.int32(4)))
    # Nine tokens are written in the end, since the last token is never fed.
    assert infos.split.tokens[:5].tolist() == [4, 6, 7, 8, 9]
    assert infos.split.reserved[:5].tolist() == [4, 2, 1, 0, 0]
    assert infos.split.internal[:5].tolist() == [0, 0, 0, 0, 3]


def test_a_group_is_one_where_a_sequence_between_has_ended() -> None:
    groups = ledger.find_groups(jnp.asarray([-1, 3, -1, 3, 4, -1], jnp.int32))
    assert groups.first.tolist() == [0, 1, 2, 1, 4, 5]
    assert groups.is_first.tolist() == [True, True, True, False, True, True]


def test_time_passes_in_microseconds() -> None:
    advance = jax.jit(jaxkv_clock.advance)
    clock, micros = advance(
        jnp.asarray([86_400 * 400, 999_999], jnp.int32), jnp.float32(1e-6)
    )
    assert clock.tolist() == [86_400 * 400 + 1, 0]
    assert int(micros) == 1
    clock, micros = advance(clock, jnp.float32(1500.25))
    assert clock.tolist() == [86_400 * 400 + 1501, 250_000]
    times = np.array([0.0, 1.9999996, 12.5])
    np.testing.assert_array_equal(from_seconds(times), [[0, 0], [2, 0], [12, 500_000]])
    # 2.3 - 2 is below 0.3 in float64; truncation would lose a microsecond.
    assert from_seconds(2.3).tolist() == [2, 300_000]
    assert from_seconds(2.0**31 - 1).tolist() == [2**31 - 1, 0]
    later = functools.partial(jaxkv_clock.latest, jnp.asarray([5, 7], jnp.int32))
    assert later(jnp.asarray([5, 8], jnp.int32)).tolist() == [5, 8]
    assert later(jnp.asarray([4, 9], jnp.int32)).tolist() == [5, 7]


BUGS = {
    "the last token has a place": Bug(
        counted_pages,
        "break_down",
        "jnp.maximum(limit - 1, pages.length)",
        "limit",
        test_places_are_divided_by_their_use,
    ),
    "places ahead count as tokens": Bug(
        counted_pages,
        "break_down",
        "tokens = within(pages.length)",
        "tokens = within(pages.places)",
        test_places_are_divided_by_their_use,
    ),
    "clients do not wait for answers": Bug(
        apply_plan,
        "enqueue_arrivals",
        "comes &= index < state.num_done + workload.clients",
        "",
        test_a_closed_loop_holds_as_many_requests_as_it_has_clients,
    ),
    "finished requests are not counted": Bug(
        simulation_step,
        "_retire",
        "state.num_done + jnp.sum(over, dtype=jnp.int32)",
        "state.num_done",
        test_requests_that_can_never_fit_are_rejected,
    ),
    "requests beyond the queue are not waiting": Bug(
        simulation_step,
        "_count_waiting",
        "info.num_waiting + num_outside",
        "info.num_waiting",
        test_all_arrived_requests_are_counted_as_waiting,
        (None,),
    ),
    "requests arrive too early": Bug(
        apply_plan,
        "enqueue_arrivals",
        "comes &= is_past(workload.arrival[request], books.clock)",
        "",
        test_idle_time_is_skipped_and_the_clock_stays_exact_for_days,
    ),
    "an idle machine waits step by step": Bug(
        simulation_step,
        "_advance_clock",
        "jnp.where(idle, latest(clock, arrival), clock)",
        "clock",
        test_idle_time_is_skipped_and_the_clock_stays_exact_for_days,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_seeded_bug_is_noticed(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        bug.noticed_by(*bug.arguments)
        # A new program, since that of the correct functions is cached.
        fresh_simulate = functools.partial(simulate)
        patch.setitem(globals(), "run", jax.jit(fresh_simulate))
        mutation.seed(patch, bug)
        with pytest.raises(AssertionError):
            bug.noticed_by(*bug.arguments)
