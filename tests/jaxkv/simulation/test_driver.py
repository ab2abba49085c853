"""The driver of simulations: sums on the host, warnings and errors."""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock, scheduling, simulation
from jaxkv.progress import Quiet
from jaxkv.scheduling import NO_LIMIT, Counts, Plan
from jaxkv.simulation import (
    SimulationMember,
    SimulationResult,
    Work,
    disaggregated,
    read_outcomes,
    simulate_workload,
)
from jaxkv.simulation.state import Capacity, Simulation
from jaxkv.workloads import (
    Workload,
    gaps_between_tokens,
    lengths,
    make_workload,
    md1_waiting_s,
)
from scaling.costs import linear_cost
from tests.support import simulations

BOUNDS = Capacity(*(jnp.int32(x) for x in (22, 4, 60, 24, 0)))
COST = linear_cost((10.0, 0.5, 0.0), (10.0, 0.01, 0.2))
TOTAL = (40, 30, 25)
"""Requests of each member; the last member is a closed loop."""


def load(seed: int, num: int, clients: int) -> Workload:
    """Requests, of which the middle one can never fit."""
    base = simulations.workload(seed, num, rate=20.0, longest=29)
    prompt = base.prompt.at[num // 2].set(70)
    return base._replace(prompt=prompt, clients=jnp.int32(clients))


LOADS = [
    load(i, num, clients)
    for i, (num, clients) in enumerate(zip(TOTAL, (NO_LIMIT, NO_LIMIT, 2), strict=True))
]


@functools.cache
def served(**options: Any) -> SimulationResult:
    members = [
        SimulationMember(load, BOUNDS, scheduling.fcfs(), COST) for load in LOADS
    ]
    return simulation.simulate(
        simulation.stack(members),
        max_slots=6,
        keep_trace=True,
        steps_per_call=50,
        **options,
    )


def test_samples_share_the_prompt_and_recompute_alone() -> None:
    load = simulations.workload(3, 12, max_samples=3)
    bounds = Capacity.of(num_pages=42, page_size=4, max_length=60, token_budget=24)
    member = SimulationMember(load, bounds, scheduling.fcfs(), COST)
    outcome = simulation.simulate(
        simulation.stack([member]), max_slots=9, max_samples=3, steps_per_call=256
    )
    samples = np.asarray(load.samples)
    output = np.asarray(load.output)
    assert outcome.totals.drawn[0] == (samples * output).sum()
    assert (outcome.preempted[0] > 1).any()
    fed = outcome.totals.decoded[0] + outcome.totals.read[0]
    tokens = np.asarray(load.prompt) + samples * (output - 1)
    assert fed == tokens.sum() + outcome.recomputed[0].sum()


def test_all_are_served_and_all_steps_are_summed() -> None:
    outcome = served()
    for i, load in enumerate(LOADS):
        num = TOTAL[i]
        assert outcome.rejected[i].nonzero()[0].tolist() == [num // 2]
        is_served = np.arange(max(TOTAL)) < num
        is_served[num // 2] = False
        np.testing.assert_array_equal(np.isfinite(outcome.finish_s[i]), is_served)
        assert outcome.trace is not None
        trace = outcome.trace.member(i)
        info: Any = trace.info
        assert outcome.totals.drawn[i] == np.asarray(load.output)[is_served[:num]].sum()
        assert outcome.totals.preempted[i] == outcome.preempted[i].sum()
        # Fed: every prompt, all emitted tokens but the last one, and recomputed tokens.
        fed = outcome.totals.decoded[i] + outcome.totals.read[i]
        tokens = (np.asarray(load.prompt) + np.asarray(load.output) - 1)[
            is_served[:num]
        ]
        assert fed == tokens.sum() + outcome.recomputed[i].sum()
        busy = info.micros / clock.MICROS_PER_SECOND
        np.testing.assert_allclose(outcome.totals.busy_s[i], busy.sum())
        for mean, values in (
            ("batch", info.num_running),
            ("tokens", info.split.tokens),
        ):
            expected = (busy * values).sum() / busy.sum()
            places = 88 if mean == "tokens" else 1
            np.testing.assert_allclose(
                getattr(outcome.means, mean)[i], expected / places
            )
        gaps = gaps_between_tokens(info.drew, trace.start_s + busy)
        spent = np.zeros(max(TOTAL))
        np.add.at(spent, gaps.sequence, gaps.seconds)
        took = (outcome.finish_s - outcome.first_s)[i]
        np.testing.assert_allclose(spent[is_served], took[is_served], atol=1e-6)
    assert outcome.totals.preempted.sum() > 0
    np.testing.assert_allclose(
        outcome.means.tokens
        + outcome.means.reserved
        + outcome.means.internal
        + outcome.means.external,
        1.0,
    )


def test_in_a_closed_loop_requests_come_when_clients_are_answered() -> None:
    outcome = served()
    arrival = outcome.arrival_s[2]
    finish = outcome.finish_s[2]
    is_served = np.isfinite(finish)
    for k, at in enumerate(arrival[is_served]):
        before = np.sum(finish[is_served] <= at + 1e-6)
        assert k - before < 2
    sent = clock.to_seconds(np.asarray(LOADS[2].arrival))
    assert (
        arrival[: TOTAL[2]][is_served[: TOTAL[2]]] > sent[is_served[: TOTAL[2]]]
    ).any()


def test_a_simulation_ends_at_a_time() -> None:
    full_run = served()
    cut = served(since_s=0.5, until_s=1.0)
    assert (cut.end_s == 1.0).all()
    early = full_run.finish_s <= 1.0
    np.testing.assert_array_equal(np.isfinite(cut.finish_s), early)
    np.testing.assert_array_equal(cut.finish_s[early], full_run.finish_s[early])
    assert cut.totals.busy_s.max() < 0.55


def test_a_stopped_run_returns_partial_results() -> None:
    stopped = Quiet()
    stopped.stopped = True
    outcome = served(progress=stopped)
    assert (
        0 < np.isfinite(outcome.finish_s).sum() < np.isfinite(served().finish_s).sum()
    )


def test_members_of_different_types_are_refused(no_type_checks) -> None:
    member = SimulationMember(LOADS[0], BOUNDS, scheduling.fcfs(), COST)
    other = member._replace(policy=scheduling.fcfs(victim="cheapest"))
    with pytest.raises(ValueError, match="policy must have the same type in all"):
        simulation.stack([member, other])
    with pytest.raises(ValueError, match="must have at least one member"):
        simulation.stack([])
    for field, value in (("policy", scheduling.fcfs), ("cost", 0.02)):
        wrong: dict[str, Any] = {**member._asdict(), field: value}
        with pytest.raises(ValueError, match=rf"^{field}=.* must be a "):
            simulation.stack([SimulationMember(**wrong)])


def test_unstacked_members_are_refused(no_type_checks) -> None:
    members: Any = [SimulationMember(LOADS[0], BOUNDS, scheduling.fcfs(), COST)]
    with pytest.raises(ValueError, match=r"must be stacked: simulate\(stack\("):
        simulation.simulate(members, max_slots=6)


def test_a_cost_may_be_a_function() -> None:
    def step_s(work: Work) -> jax.Array:
        return COST(work)

    members = [
        SimulationMember(load, BOUNDS, scheduling.fcfs(), step_s) for load in LOADS
    ]
    outcome = simulation.simulate(
        simulation.stack(members), max_slots=6, steps_per_call=50
    )
    np.testing.assert_array_equal(outcome.finish_s, served().finish_s)
    other = members[0]._replace(cost=lambda work: jnp.float32(0.1))
    with pytest.raises(ValueError, match="cost must have the same type in all"):
        simulation.stack([members[1], other])


@pytest.mark.slow
def test_one_server_of_constant_service_waits_as_queues_do() -> None:
    """M/D/1: each path by Lindley's recursion, and the mean by the closed formula."""
    service_s = 0.2
    num = 4000
    rates = np.repeat([1.0, 2.5, 4.0], 8)
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(1 / rates[:, None], (len(rates), num)), axis=1)
    arrival = np.round(arrival, 6)
    ones = jnp.ones(num, jnp.int32)
    bounds = Capacity(*(jnp.int32(x) for x in (10, 4, 20, 24, 0)))
    cost = linear_cost((service_s, 0.0, 0.0), (1.0, 0.0, 0.0), scale=1.0)
    members = [
        (
            Workload(
                jnp.asarray(clock.from_seconds(times)),
                5 * ones,
                ones,
                ones,
                jnp.int32(NO_LIMIT),
            ),
            bounds,
            scheduling.fcfs(),
            cost,
        )
        for times in arrival
    ]
    outcome = simulation.simulate(simulation.stack(members), max_slots=1, head=1)
    free = np.zeros(len(rates))
    for k in range(num):
        free = np.maximum(free, arrival[:, k]) + service_s
        np.testing.assert_allclose(outcome.finish_s[:, k], free, atol=1e-5)
    waits = (outcome.finish_s - arrival - service_s).mean(axis=1).reshape(3, -1)
    expected = [md1_waiting_s(float(rate), service_s) for rate in rates[::8]]
    np.testing.assert_allclose(waits.mean(axis=1), expected, rtol=0.08)


@pytest.mark.thorough
def test_a_run_to_the_end_is_that_of_the_driver() -> None:
    members = simulation.stack(
        [SimulationMember(load, BOUNDS, scheduling.fcfs(), COST) for load in LOADS]
    )

    @jax.jit
    def run(loads: Workload) -> Simulation:
        def one(load: Workload) -> Simulation:
            return simulate_workload(load, BOUNDS, scheduling.fcfs(), COST, max_slots=6)

        return jax.vmap(one)(loads)

    state = run(members.workload)
    expected = served()
    line = (
        r"3 of 95 requests were rejected: they do not fit into an idle engine;"
        r" the first is request 20 of member \(0,\): 70 \+ \d+ tokens, 1 sequences"
    )
    with pytest.warns(UserWarning, match=line):
        outcome = read_outcomes(state, members.workload)
    for name, values in vars(outcome).items():
        np.testing.assert_array_equal(values, getattr(expected, name), name)
    one: Any = jax.tree.map(lambda x: x[2], (state, members.workload))
    np.testing.assert_array_equal(
        read_outcomes(*one, warns=False).arrival_s, expected.arrival_s[2]
    )


class AdmitFirst(NamedTuple):
    """A policy that admits the first requests, and then none."""

    max_admitted: jax.Array
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        room = self.max_admitted - jnp.sum(counts.running, dtype=jnp.int32)
        rank = jnp.arange(counts.waiting.shape[0], dtype=jnp.int32)
        return scheduling.fcfs().plan(
            counts._replace(waiting=counts.waiting & (rank < room))
        )


@pytest.mark.thorough
def test_a_run_without_admissions_ends_with_a_warning() -> None:
    load = make_workload(np.zeros(3), np.full(3, 5), np.full(3, 2))

    @jax.jit
    def run(max_admitted: jax.Array) -> Simulation:
        def one(max_admitted: jax.Array) -> Simulation:
            return simulate_workload(
                load, BOUNDS, AdmitFirst(max_admitted), COST, max_slots=6
            )

        return jax.vmap(one)(max_admitted)

    state = run(jnp.arange(2, dtype=jnp.int32))
    line = r"3 of 6 requests were not served to their end; the first is request 0 of"
    with pytest.warns(UserWarning, match=line):
        outcome = read_outcomes(state, load)
    np.testing.assert_array_equal(np.isfinite(outcome.finish_s).sum(1), [0, 3])
    assert not outcome.rejected.any()


def test_bounds_are_checked_and_have_defaults() -> None:
    capacity = Capacity.of(num_pages=22)
    assert [int(x) for x in capacity[:5]] == [22, 16, 2048, 2048, 0]
    for name, minimum in (("num_pages", 1), ("max_length", 2), ("max_swap_pages", 0)):
        line = rf"{name}={minimum - 1} must be in \[{minimum}, 1073741824\)"
        with pytest.raises(ValueError, match=line):
            Capacity.of(**{"num_pages": 22, name: minimum - 1})
    with pytest.raises(ValueError, match="page_size=True must be a whole number"):
        Capacity.of(num_pages=22, page_size=True)


def test_pages_are_sent_by_as_many_gpus_as_the_smaller_replica_has() -> None:
    prefill = types.SimpleNamespace(num_gpus=4, kv_bytes=10.0)
    decode = types.SimpleNamespace(num_gpus=2)
    placement: Any = types.SimpleNamespace(
        prefill=prefill, decode=decode, num_prefill=1, link=5.0
    )
    tokens = lengths.Lengths(np.array([3, 6]), np.array([1, 1]))
    load = disaggregated.RequestLoad(np.zeros(2), tokens)
    times = disaggregated.transfer_times(placement, load, np.array([0.0, 1.0]))
    assert times.tolist() == [3.0, 8.0]
