"""Policies that make no progress in simulations, and the metrics of such runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import simulation
from jaxkv.simulation import (
    Capacity,
    SimulationMember,
    SimulationResult,
    read_outcomes,
    simulate_workload,
)
from jaxkv.workloads import make_workload, normalised_latency_s
from tests.support import moods, simulations
from tests.support.moods import Moody

BOUNDS = Capacity.of(num_pages=22, page_size=4, max_length=60, token_budget=24)
LOAD = make_workload(
    np.array([0.0, 0.0, 0.0, 9.0, 9.5]), np.array([29, 5, 12, 3, 4]), np.full(5, 3)
)


def simulate(*played: int) -> SimulationResult:
    """Simulates the load under several faulty policies, mapped together."""
    members = [
        SimulationMember(LOAD, BOUNDS, Moody(jnp.int32(mood)), simulations.COST)
        for mood in (*played, *[moods.PLAIN] * (3 - len(played)))
    ]
    return simulation.simulate(
        simulation.stack(members), max_slots=6, steps_per_call=96
    )


@pytest.mark.parametrize("mood", [moods.REFUSES, moods.THRASHES, moods.PAUSES])
def test_a_policy_without_progress_is_an_error(mood: int) -> None:
    line = r"policy Moody made no progress for 64 steps while request \d of member 1"
    with pytest.raises(jaxkv.StallError, match=line):
        simulate(moods.PLAIN, mood)


def test_policies_that_mask_or_wait_serve_every_request() -> None:
    outcome = simulate(moods.PLAIN, moods.SHORTEST, moods.FILLS)
    assert np.isfinite(outcome.finish_s).all()
    # The longest request is served first or last; the fourth waits for the fifth.
    assert outcome.first_s[1, 0] > outcome.first_s[1, 1:3].max()
    assert outcome.first_s[0, 3] < 9.2
    assert outcome.first_s[2, 3] > 9.5


@pytest.mark.thorough
def test_a_run_inside_a_program_ends_and_its_latency_is_not_a_number() -> None:
    @jax.jit
    def run(mood: jax.Array) -> Any:
        policy = Moody(mood)
        return simulate_workload(LOAD, BOUNDS, policy, simulations.COST, max_slots=6)

    for mood in (moods.REFUSES, moods.THRASHES):
        state = run(jnp.int32(mood))
        with pytest.warns(
            UserWarning, match="5 of 5 requests were not served to their"
        ):
            outcome = read_outcomes(state, LOAD)
        with pytest.warns(UserWarning, match="5 of 5 requests have no value"):
            latency = normalised_latency_s(
                outcome.arrival_s, outcome.finish_s, np.asarray(LOAD.output)
            )
        assert np.isnan(latency)
