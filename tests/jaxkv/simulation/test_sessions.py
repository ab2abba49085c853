"""Closed-loop sessions equal plain Python and the engine, step for step."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ledger, scheduling, simulation
from jaxkv.simulation import Capacity, SimulationMember, SimulationResult, sessions
from jaxkv.workloads import Dependencies, Workload, make_workload
from tests.support import simulations
from tests.support.simulations import COST
from tests.support.vllm_reference import (
    ReferenceRequest,
    ReferenceScheduler,
    ReferenceStep,
)

BLOCK_SIZE = 4
HEAD = 3
"""Waiting requests that a policy sees; more wait outside the queue."""
BOUNDS = (
    {"max_num_seqs": 9, "budget": 16, "num_blocks": 40},
    {"max_num_seqs": 9, "budget": 64, "num_blocks": 18},
    {"max_num_seqs": 2, "budget": 24, "num_blocks": 40},
)
"""Bounds of three members; the second one preempts, the third one queues."""

# Calls without type annotations, which the test runner would check first.
make: Any = inspect.unwrap(make_workload)


def columns(seed: int, num: int) -> dict[str, np.ndarray]:
    """Random requests of sessions, some of which arrive together."""
    rng = np.random.default_rng(seed)
    after, delay_us = simulations.dependencies(seed, num)
    return {
        "arrival_us": np.cumsum(rng.choice([0, 30_000, 200_000], num)),
        "prompt": rng.integers(1, 30, num),
        "output": rng.integers(1, 30, num),
        "context": BLOCK_SIZE * rng.integers(0, 12, num),
        "after": after,
        "delay_us": delay_us,
    }


def session_workload(x: dict[str, np.ndarray]) -> Workload:
    return make_workload(
        x["arrival_us"] / 1e6,
        x["prompt"],
        x["output"],
        context=x["context"],
        after=x["after"],
        delay_s=x["delay_us"] / 1e6,
    )


def reference(x: dict[str, np.ndarray], bounds: dict[str, int]) -> ReferenceScheduler:
    requests = [
        ReferenceRequest(
            *(
                int(x[name][i])
                for name in ("arrival_us", "prompt", "output", "context")
            ),
            after=tuple(int(k) for k in x["after"][i] if k >= 0),
            delay_us=int(x["delay_us"][i]),
        )
        for i in range(x["prompt"].size)
    ]
    return ReferenceScheduler(
        requests,
        num_blocks=bounds["num_blocks"],
        block_size=BLOCK_SIZE,
        max_num_seqs=bounds["max_num_seqs"],
        max_num_batched_tokens=bounds["budget"],
        threshold=0,
        head=HEAD,
    )


def simulate(loads: list[Workload], **options: Any) -> SimulationResult:
    members = []
    for load, bounds in zip(loads, BOUNDS, strict=True):
        capacity = Capacity.of(
            num_pages=bounds["num_blocks"],
            page_size=BLOCK_SIZE,
            max_length=200,
            token_budget=bounds["budget"],
        )
        policy = scheduling.vllm_scheduler(max_num_seqs=bounds["max_num_seqs"])
        members.append(SimulationMember(load, capacity, policy, COST))
    stacked = simulation.stack(members)
    return simulation.simulate(
        stacked, max_slots=9, head=HEAD, keep_trace=True, steps_per_call=256, **options
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_steps_equal_those_of_plain_python(seed: int) -> None:
    """Members of different sizes, mapped; chains, fan-out, joins, ties, preemption."""
    sizes = (30, 24, 30)
    loads = [columns(3 * seed + i, num) for i, num in enumerate(sizes)]
    result = simulate([session_workload(x) for x in loads])
    num_preempted = num_waiting = 0
    for member, (x, bounds) in enumerate(zip(loads, BOUNDS, strict=True)):
        slow = reference(x, bounds)
        steps = zip(*slow.run(), strict=True)
        expected = dict(zip(ReferenceStep._fields, map(np.array, steps), strict=True))
        assert result.trace is not None
        info: Any = result.trace.member(member).info
        info = jax.tree.map(lambda a, keep=info.micros > 0: a[keep], info)
        work = info.work._asdict()
        actual = {
            "start_us": info.start.astype(np.int64) @ [1_000_000, 1],
            "num_finished": info.num_finished,
            "used_blocks": info.used_pages,
        }
        for field, values in expected.items():
            other = work.get(field, getattr(info, field, None))
            column = actual.get(field, other)
            np.testing.assert_array_equal(column, values, err_msg=field)
        num = x["prompt"].size
        times = [[r.arrival_us, r.finish_us] for r in slow.requests]
        member_times = np.stack(
            [result.arrival_s[member], result.finish_s[member]], axis=1
        )
        np.testing.assert_allclose(member_times[:num], np.array(times) / 1e6, atol=1e-7)
        assert np.isnan(member_times[num:]).all()
        num_preempted += expected["num_preempted"].sum()
        num_waiting += expected["num_waiting"].sum()
    assert not result.rejected.any()
    assert num_preempted > 0
    assert num_waiting > 0


def test_requests_enter_in_order_of_time_and_index() -> None:
    """Given and released requests with many equal times, into a queue with room."""
    enqueue = jax.jit(sessions.enqueue_due, static_argnums=3)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        is_root = rng.permutation(10) < 5
        times = rng.integers(0, 3, (10, 2))
        times[is_root] = sorted(times[is_root].tolist())
        roots = np.flatnonzero(is_root)
        turns = rng.permutation(np.flatnonzero(~is_root))
        state = sessions.SessionState(
            arrival=jnp.asarray(times, jnp.int32),
            num_open=jnp.zeros(10, jnp.int32),
            due=jnp.asarray(times[turns], jnp.int32),
            request=jnp.asarray(turns, jnp.int32),
            num_roots=jnp.int32(5),
            num_roots_taken=jnp.int32(1),
        )
        order = jnp.asarray([*roots, *turns], jnp.int32)
        books = ledger.make_ledger(
            num_slots=2, num_places=9, num_sequences=10, has_groups=False, holds=False
        )
        clock = rng.integers(0, 3, 2)
        books = books._replace(
            clock=jnp.asarray(clock, jnp.int32), num_waiting=jnp.int32(1)
        )
        left, books, upcoming = enqueue(state, books, order, 7)
        arrivals = sorted((*times[i].tolist(), i) for i in [*roots[1:], *turns])
        come = [x for x in arrivals if tuple(x[:2]) <= tuple(clock.tolist())][:6]
        assert books.queue[1 : 1 + len(come)].tolist() == [x[2] for x in come]
        assert int(books.num_waiting) == 1 + len(come)
        following = arrivals[len(come) :]
        if following:
            assert (*upcoming.time.tolist(), int(upcoming.request)) == following[0]
        else:
            assert int(upcoming.time[0]) == sessions.NEVER_S
        num_turns = int((left.due[:, 0] < sessions.NEVER_S).sum())
        assert num_turns == sum(not is_root[x[2]] for x in following)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("groups, swap", 20),
        *(
            (name, seed)
            for name in ("plain", "groups", "shortest remaining", "fair share")
            for seed in (21, 22)
        ),
    ],
)
def test_steps_equal_those_of_an_engine_and_its_client(name: str, seed: int) -> None:
    """With several samples, swapping, and policies that read dynamic arrival times."""
    case = {**simulations.CASES, **simulations.BY_ATTRIBUTES}[name]
    num = 30
    w = simulations.workload(seed, num, max_samples=case.max_samples)
    if name in simulations.BY_ATTRIBUTES:
        w = simulations.with_attributes(w, seed)
    after, delay_us = simulations.dependencies(seed, num)
    session_load = make_workload(
        np.zeros(num),
        np.asarray(w.prompt),
        np.asarray(w.output),
        after=after,
        delay_s=delay_us / 1e6,
    )
    arrival = np.where(after[:, :1] < 0, np.asarray(w.arrival), session_load.arrival)
    w = w._replace(arrival=jnp.asarray(arrival), dependencies=session_load.dependencies)
    run = simulations.compare_with_engine(w, case, seed)
    simulations.assert_equal_steps(run)
    assert int(run.simulation.num_done) == num


def test_requests_after_a_rejected_one_are_never_sent() -> None:
    """The sizes are those of the first test, whose program is used again."""
    loads = [columns(i, num) for i, num in enumerate((30, 24, 30))]
    expected = []
    for x in loads:
        x["prompt"][2] = 170
        lost = {2}
        for i, inputs in enumerate(x["after"].tolist()):
            if lost & {*inputs}:
                lost.add(i)
        expected.append(sorted(lost))
    assert min(map(len, expected)) > 1
    result = simulate([session_workload(x) for x in loads])
    for member, (x, lost) in enumerate(zip(loads, expected, strict=True)):
        assert result.rejected[member].nonzero()[0].tolist() == lost
        num = x["prompt"].size
        unanswered = np.isnan(result.finish_s[member, :num])
        assert unanswered.nonzero()[0].tolist() == lost
        never_sent = np.isnan(result.arrival_s[member, :num]).nonzero()[0].tolist()
        assert never_sent == [i for i in lost if x["after"][i, 0] >= 0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"after": [[-1], [-1], [2]]}, "request 2: is after request 2, not one"),
        ({"after": [[1], [-1], [-1]]}, "request 0: is after request 1, not one"),
        ({"after": [[-1], [-2], [-1]]}, "request 1: is after request -2, not one"),
        ({"after": [[-1, -1]] * 2 + [[0, 0]]}, "request 2: is after request 0 twice"),
        ({"after": [-1, 0, 1]}, r"after must have shape \[3, width\], not \(3,\)"),
        ({"after": [[-1.0]] * 3}, "after must be whole numbers, not float64"),
        ({"delay_s": [-1, 0, 0]}, "request 0: has delay_s=-1.0, not in"),
        ({"delay_s": [0, np.nan, 0]}, "request 1: has delay_s=nan, not in"),
        ({"delay_s": [1, 0, 0]}, "request 0: has delay_s=1.0, but is after none"),
        ({"clients": 2}, "clients=2 must be None for requests with `after`"),
        ({"after": None, "delay_s": 1.0}, "delay_s must be 0 without `after`"),
        ({"arrival_s": [1, 0, 0.5]}, "request 2: arrives at 0.5 s, before"),
    ],
)
def test_impossible_sessions_are_refused(options: dict[str, Any], line: str) -> None:
    ones = np.ones(3, int)
    arguments = {"arrival_s": np.zeros(3), "after": [[-1], [0], [-1]]} | options
    with pytest.raises(ValueError, match=line):
        make(prompt=ones, output=ones, **arguments)


def dependencies(after: np.ndarray) -> Dependencies:
    num = len(after)
    w = make_workload(np.zeros(num), *np.ones((2, num), int), after=after)
    assert w.dependencies is not None
    return w.dependencies


def test_lanes_are_chains_and_few() -> None:
    """At most one request of a lane can be sent and not answered."""
    for seed in range(4):
        after, _ = simulations.dependencies(seed, 40)
        links = dependencies(after)
        lane = np.asarray(links.lane)
        comes_later = np.zeros((40, 40), bool)
        for i in range(40):
            for before in after[i][after[i] >= 0]:
                comes_later[i] |= comes_later[before]
                comes_later[i, before] = True
        for i in range(40):
            earlier = np.flatnonzero((lane[:i] == lane[i]) & (lane[i] >= 0))
            assert comes_later[i, earlier].all()
        assert (lane >= 0).tolist() == (after[:, 0] >= 0).tolist()
    # An agent of two sub-agents, twice, uses two lanes.
    after = np.array([[-1, -1], [0, -1], [0, -1], [1, 2], [3, -1], [3, -1], [4, 5]])
    links = dependencies(after)
    assert links.lane.tolist() == [-1, 0, 1, 0, 0, 1, 0]
    assert links.lane_start.tolist() == [1, 2]
