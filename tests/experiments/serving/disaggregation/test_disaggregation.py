"""Disaggregated prefill and decode: transfers, placement, queues and claims."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.serving.disaggregation import measurement, runs, settings
from experiments.serving.disaggregation.queues import MACHINE_NAMES, formula_s
from experiments.serving.disaggregation.settings import Instance
from jaxkv.simulation import (
    KVTransferred,
    PhasePlacement,
    RequestLoad,
    RequestTiming,
    disaggregated,
    make_work,
)
from jaxkv.workloads import Lengths, Objectives, fifo_finish_s
from scaling.costs import linear_cost
from tests.support import smoke

ONE = Instance("opt-13b", 1)


def requests(
    arrival_s: list[float], prompt: list[int], output: list[int]
) -> RequestLoad:
    tokens = Lengths(np.array(prompt), np.array(output))
    return RequestLoad(np.array(arrival_s), tokens)


def test_received_sequences_cost_a_decode_step() -> None:
    cost = linear_cost((10.0, 1.0, 0.0), (5.0, 0.1, 1.0), scale=1.0)
    work = make_work(
        num_decodes=2,
        num_prompt_rows=51,
        decode_context=100,
        prompt_context=51,
        prompt_squares=51**2,
        num_drawn=3,
    )
    # Three sequences, 151 tokens attended to.
    seconds = float(KVTransferred(cost, jnp.asarray(True))(work))
    assert seconds == pytest.approx(5 + 0.1 * 151 + 3)
    assert float(KVTransferred(cost, jnp.asarray(False))(work)) == float(cost(work))


def test_transfers_are_serialized() -> None:
    done = fifo_finish_s(np.array([0, 1, 5.0]), np.full(3, 2.0))
    assert done.tolist() == [2, 4, 7]


def test_keys_and_values_queue_at_the_replica_that_sends() -> None:
    load = requests([0.0] * 4, [100, 100, 200, 100], [2] * 4)
    transfer_s = 100 * settings.kv_bytes("opt-13b") / 1e9
    assert transfer_s == pytest.approx(0.08192)
    one = ONE.replica
    sent = PhasePlacement(one, one, 2, 1, link=1e9)
    ready_s = np.array([1.0, 1.0, 1.0, np.nan])
    times_s = disaggregated.transfer_times(sent, load, ready_s)
    # The same replica prefills the first and the third; the fourth is not prefilled.
    np.testing.assert_allclose(
        times_s, [transfer_s, transfer_s, 3 * transfer_s, np.nan]
    )
    wide = sent._replace(
        prefill=one._replace(num_gpus=4), decode=one._replace(num_gpus=2)
    )
    times_s = disaggregated.transfer_times(wide, load, ready_s)
    np.testing.assert_allclose(times_s[:2], transfer_s / 2)


@pytest.mark.thorough
def test_a_request_is_transferred_and_then_decodes() -> None:
    load = requests([0.5, 0.6], [512, 300], [4, 1])
    placed = PhasePlacement(ONE.replica, ONE.replica, 1, 1, settings.LINK)
    (answers,) = disaggregated.simulate_placements(
        [(placed, load)], 10.0, max_slots=256
    )
    prefill, decode = (np.asarray(x) for x in (ONE.cost.prefill, ONE.cost.decode))
    first = 0.5 + prefill @ (1, 512, 512**2)
    sent = 512 * settings.kv_bytes("opt-13b") / settings.LINK
    steps = sum(decode @ (1, 512 + k, 1) for k in (1, 2, 3))
    assert answers.first_s[0] == pytest.approx(first, abs=1e-5)
    assert answers.transfer_s[0] == pytest.approx(sent)
    assert answers.finish_s[0] == pytest.approx(first + sent + steps, abs=1e-5)
    # A request for one token ends with its prefill.
    assert answers.finish_s[1] == answers.first_s[1] > answers.first_s[0]
    assert answers.preempted == 0


def test_late_requests_do_not_count_and_unanswered_ones_fail() -> None:
    answers = RequestTiming(
        arrival_s=np.array([0.0, 1.0, 2.0, 3.0, np.nan]),
        first_s=np.array([0.1, 1.1, 2.5, 3.1, 9.0]),
        finish_s=np.array([1.1, 2.1, 3.5, np.nan, 9.0]),
        output=np.array([11, 11, 11, 11, 11]),
        transfer_s=np.array([0.01, 0.01, 0.01, 0.04, np.nan]),
        preempted=0,
    )
    objectives = Objectives(first_s=0.2, per_token_s=0.1)
    placement = ("split", 2, 1, 1, 2, 1e9)
    loads = runs.PlacementLoads.of(
        [runs.judge_load("x", answers, objectives, placement, 8.0)]
    )
    assert loads.rate_per_card[0] == 2.0
    assert loads.ttft_s[0] == pytest.approx(0.5)
    assert loads.tpot_s[0] == np.inf
    attainment = loads.attained[0], loads.attained_first[0], loads.attained_gap[0]
    assert attainment == pytest.approx((0.5, 0.75, 0.75))
    assert loads.quick_share[0] == 0.75


def test_the_best_placement_per_gpu_is_chosen() -> None:
    # Requests/s per GPU, by role and GPUs of a replica.
    of_each = {"prefill": {1: 5.0, 2: 6.0, 4: 1.0}, "decode": {1: 9.0, 2: 2.0, 4: 1.0}}
    phases = runs.PhaseGoodputs.of(
        ("chat, 13B", role, num, rate)
        for role, rates in of_each.items()
        for num, rate in rates.items()
    )
    chosen, sustains = runs.best_placement("chat, 13B", phases)
    assert (chosen.prefill.num_gpus, chosen.decode.num_gpus) == (2, 1)
    # 3 replicas prefill 12 requests/s and 4 decode 9 each: all 10 GPUs are busy.
    assert (chosen.num_prefill, chosen.num_decode, sustains) == (3, 4, 36.0)


@pytest.mark.slow
def test_claims_follow_from_the_result() -> None:
    smoke_run = smoke.run("disaggregation")
    measured = smoke.measured_values(smoke_run.claims)
    queues = smoke_run.result.queues
    # Keys and values of OPT-66B: 64 layers of 9,216, in two bytes each.
    size = 512 * 2 * 64 * 9216 * 2 / 2**30
    assert measured["keys and values of 512 tokens of OPT-66B"] == size == 1.125
    sending = "sending the keys and values of 10 requests/s of 512 tokens of OPT-66B"
    assert measured[sending] == 11.25
    off = "mean waiting time of a queue of prompts, {}: off the formula by"
    for i, machine in enumerate(MACHINE_NAMES):
        waiting_s = [
            formula_s(machine, rate) for rate in np.asarray(queues.rate).tolist()
        ]
        apart = abs(queues.simulated_s[i] - waiting_s) / queues.waiting_s[i]
        assert measured[off.format(machine)] == pytest.approx(100 * apart.max())


@pytest.mark.slow
def test_workers_and_simulator_serve_the_same_requests() -> None:
    config = measurement.Config(
        **{"model": "random-tiny", "prompt_tokens": 64, "output_tokens": 4},
        **{"shares_served": (0.2,), "seconds": 0.5, "repeats": 1, "max_slots": 2},
        token_budget=32,
    )
    result = measurement.run(config)
    assert len(result.loads) == 2
    assert result.answers == result.loads.requests[0] >= 2
    assert result.different == 0
    assert result.page_bytes == pytest.approx(result.formula_bytes, rel=0.5)
    assert (result.loads.said_first_s > 0).all()
    assert (result.loads.first_s > 0).all()
    off = dataclasses.replace(result, different=1)
    first = measurement.claims(result)[0]
    other = measurement.claims(off)[0]
    assert (first.ours, other.ours) == (0, 1)
    assert (first.verdict, other.verdict) == ("holds", "fails")
