"""`vllm_scheduler` schedules as a plain-Python scheduler, step for step."""

import inspect
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.scheduling.vllm import AdmissionRule
from jaxkv.simulation import Capacity
from jaxkv.simulation import step as simulation_step
from jaxkv.workloads import Workload, make_workload
from tests.support.simulations import COST
from tests.support.vllm_reference import (
    ReferenceRequest,
    ReferenceScheduler,
    ReferenceStep,
)

BLOCK_SIZE = 4
untyped: Any = inspect.unwrap(scheduling.vllm_scheduler)


class Load(NamedTuple):
    """Bounds of a server, and random requests that fit into it."""

    max_num_seqs: int
    budget: int
    threshold: int
    num_blocks: int
    rule: AdmissionRule = "vllm-0.15"


LOADS = {
    "chunks": Load(max_num_seqs=9, budget=16, threshold=0, num_blocks=40),
    "pages run out": Load(max_num_seqs=9, budget=64, threshold=0, num_blocks=18),
    "few sequences": Load(max_num_seqs=3, budget=24, threshold=0, num_blocks=40),
    "short chunks": Load(max_num_seqs=9, budget=40, threshold=5, num_blocks=24),
    "whole prompts": Load(9, budget=8, threshold=0, num_blocks=18, rule="vllm-0.19"),
    "whole prompts, short chunks": Load(9, 40, 5, num_blocks=24, rule="vllm-0.19"),
}


def simulated(workload: Workload, load: Load) -> simulation_step.SimulatedStep:
    """The steps of a simulation that took time."""
    capacity = Capacity.of(
        num_pages=load.num_blocks,
        page_size=BLOCK_SIZE,
        max_length=200,
        token_budget=load.budget,
    )
    policy = scheduling.vllm_scheduler(
        max_num_seqs=load.max_num_seqs,
        long_prefill_token_threshold=load.threshold,
        rule=load.rule,
    )
    state, infos = run(workload, capacity, policy)
    assert int(state.num_done) == workload.prompt.size
    keep = np.asarray(infos.micros) > 0
    return jax.tree.map(lambda x: np.asarray(x)[keep], infos)


@jax.jit
def run(
    workload: Workload, capacity: Capacity, policy: scheduling.Policy
) -> tuple[simulation_step.Simulation, simulation_step.SimulatedStep]:
    state = simulation_step.init_simulation(workload, capacity, policy, max_slots=9)
    return simulation_step.simulate_steps(
        state, workload, capacity=capacity, policy=policy, cost=COST, num_steps=768
    )


@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, 0) for name in LOADS]
    + [
        pytest.param(name, seed, marks=pytest.mark.slow)
        for name in LOADS
        for seed in range(1, 12)
    ],
)
def test_steps_equal_those_of_the_reference(name: str, seed: int) -> None:
    load = LOADS[name]
    num = 30
    rng = np.random.default_rng(seed)
    arrival_us = np.cumsum(rng.integers(0, 60_000, num))
    prompt = rng.integers(1, 30, num)
    output = rng.integers(1, 30, num)
    context = BLOCK_SIZE * rng.integers(0, 12, num)
    reference = ReferenceScheduler(
        [
            ReferenceRequest(int(at), int(fed), int(answer), int(cached))
            for at, fed, answer, cached in zip(
                arrival_us, prompt, output, context, strict=True
            )
        ],
        num_blocks=load.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=load.budget,
        threshold=load.threshold,
        reserves_prompt=load.rule == "vllm-0.19",
    )
    steps = zip(*reference.run(), strict=True)
    expected = dict(zip(ReferenceStep._fields, map(np.array, steps), strict=True))
    workload = make_workload(arrival_us / 1e6, prompt, output, context=context)
    our_steps = simulated(workload, load)
    start = our_steps.start.astype(np.int64)
    work = our_steps.work._asdict()
    actual = {
        "start_us": start[:, 0] * 1_000_000 + start[:, 1],
        **{x: work[x] for x in ReferenceStep._fields if x in work},
        "num_admitted": our_steps.num_admitted,
        "num_preempted": our_steps.num_preempted,
        "num_waiting": our_steps.num_waiting,
        "num_running": our_steps.num_running,
        "num_finished": our_steps.num_finished,
        "used_blocks": our_steps.used_pages,
    }
    assert actual.keys() == expected.keys()
    for field, values in expected.items():
        np.testing.assert_array_equal(actual[field], values, err_msg=field)
    if name != "few sequences":
        assert expected["num_preempted"].sum() > 0
    assert expected["num_running"].max() <= load.max_num_seqs


def test_whole_prompts_wait_for_free_pages() -> None:
    """Two prompts of 12 blocks in 18, by chunks of 2 blocks: the second one waits."""
    load = Load(max_num_seqs=9, budget=8, threshold=0, num_blocks=18)
    workload = make_workload(np.zeros(30), np.full(30, 48), np.full(30, 9))
    old = simulated(workload, load)
    new = simulated(workload, load._replace(rule="vllm-0.19"))
    assert old.num_preempted.sum() > 0
    assert new.num_preempted.sum() == 0
    assert new.num_running.max() == 1


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=0 must be"):
        scheduling.vllm_scheduler(max_num_seqs=0)
    with pytest.raises(ValueError, match="long_prefill_token_threshold=-1 must be"):
        scheduling.vllm_scheduler(long_prefill_token_threshold=-1)
    with pytest.raises(ValueError, match=r"rule='vllm-1' must be 'vllm-0\.15' or"):
        untyped(rule="vllm-1")
    with pytest.raises(ValueError, match="request 1: has context=-4"):
        make_workload(
            np.zeros(2), np.ones(2, int), np.ones(2, int), context=np.array([0, -4])
        )
