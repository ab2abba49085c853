"""Drawn plans in simulations: every request is served, or one error names the cause."""

import numpy as np
import pytest

import jaxkv
from jaxkv import scheduling, simulation
from jaxkv.simulation import Capacity, SimulationMember
from tests.support import simulations
from tests.support.drawn_plans import draw_plan
from tests.support.simulations import Case

SLOTS = 9


def is_served(seed: int) -> bool:
    """Simulates one drawn policy; returns False if it stalled."""
    load = simulations.workload(3, 12, max_samples=3)
    bounds = Capacity.of(num_pages=42, page_size=4, max_length=60, token_budget=24)
    policy = draw_plan(seed, SLOTS, scheduling.fcfs())
    member = SimulationMember(load, bounds, policy, simulations.COST)
    try:
        result = simulation.simulate(
            simulation.stack([member]),
            max_slots=SLOTS,
            max_samples=3,
            steps_per_call=256,
        )
    except jaxkv.StallError:
        return False
    assert np.isfinite(result.finish_s[0]).all()
    return True


@pytest.mark.slow
def test_drawn_plans_lose_no_request() -> None:
    load = simulations.workload(3, 12, max_samples=3)
    num = 0
    for seed in range(30):
        if not is_served(seed):
            continue
        num += 1
        if num > 4:
            continue
        # The engine takes the same steps.
        policy = draw_plan(seed, SLOTS, scheduling.fcfs())
        case = Case(policy, max_samples=3, num_pages=42)
        run = simulations.compare_with_engine(load, case, 3)
        simulations.assert_equal_steps(run)
    assert num > 4


@pytest.mark.slow
def test_thousands_of_drawn_plans_lose_no_request() -> None:
    for seed in range(100, 2100):
        is_served(seed)
