"""Loads of simulated servers."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from jaxkv.scheduling import FCFS, Counts, Plan, fcfs, plan_by
from jaxkv.simulation import Totals
from scaling import shapes
from scaling.calibration import (
    PRIOR,
    PowerShares,
    ServerCoefficients,
    ServerLoad,
    ServerRun,
    ServerSetup,
    draw_coefficients,
    find_run_energy,
    make_server_load,
    simulate_server,
)
from scaling.costs import find_device

SETUP = ServerSetup(
    model=shapes.describe("llama-2-7b"),
    device=find_device("h100"),
    max_model_len=4096,
    max_num_seqs=8,
    num_blocks=40,
)


def constant_steps(num_draws: int = 1) -> ServerCoefficients:
    """Steps of 10 ms for any work, and no delays of requests."""
    values = dict.fromkeys(PRIOR, 1e9) | {"overlap": 1.0, "reduce_power": 1.0}
    overheads = [x for x in PRIOR if x.endswith("_s") or x == "delivery_lag"]
    values |= dict.fromkeys(overheads, 0.0) | {"step_s": 0.01}
    return ServerCoefficients(
        *(np.full(num_draws, values[x], np.float32) for x in PRIOR)
    )


def no_totals(num: int) -> Totals:
    return Totals(*(np.zeros(num) for _ in Totals._fields))


def load_at(rate: float, num: int, *, answer: int = 11, window_s: float = 3.0):
    return make_server_load(
        np.arange(num) / rate,
        np.full(num, 32),
        np.full(num, answer),
        prefix_tokens=np.zeros(num, int),
        block_size=16,
        warm_up_s=1.0,
        window_s=window_s,
    )


@pytest.mark.slow
def test_loads_of_one_program_are_independent() -> None:
    """Two loads and two draws in one call, against a call for each load."""
    loads = [load_at(4.0, 20), load_at(50.0, 250)]
    draws = constant_steps(2)._replace(step_s=np.array([0.01, 0.02], np.float32))
    together = simulate_server(SETUP, loads, draws, num_slots=4, keep_trace=True)
    for load, run in zip(loads, together, strict=True):
        (single,) = simulate_server(SETUP, [load], draws, keep_trace=True)
        for name in ("arrival_s", "first_s", "finish_s"):
            np.testing.assert_array_equal(getattr(run, name), getattr(single, name))
    first, second = together
    np.testing.assert_allclose(first.latencies().end_to_end_s[0], 0.11, atol=2e-6)
    np.testing.assert_allclose(first.latencies().inter_token_s[1], 0.02, atol=2e-6)
    # 12 requests in 3 s, of 11 tokens each.
    assert first.num_finished().tolist() == [12, 12]
    assert first.num_tokens().tolist() == [132, 132]
    # 8 sequences of 0.11 s serve 73 requests per second, and of 0.22 s 36.
    assert first.is_overloaded().tolist() == [False, False]
    assert second.is_overloaded().tolist() == [False, True]
    # 3 blocks of a sequence at its end, of 40; it is alone.
    assert first.step_used_share is not None
    assert first.step_used_share.max() == pytest.approx(3 / 40)
    assert 2 / 40 < first.used_share[0] < 3 / 40


def test_cached_tokens_are_whole_blocks_before_the_last_token() -> None:
    load = make_server_load(
        np.arange(4.0),
        np.array([16, 17, 40, 40]),
        np.full(4, 2),
        prefix_tokens=np.array([16, 17, 40, 20]),
        block_size=16,
        warm_up_s=0.0,
        window_s=4.0,
        resident_blocks=2,
    )
    assert np.asarray(load.workload.context).tolist() == [0, 16, 32, 16]
    assert np.asarray(load.workload.prompt).tolist() == [16, 1, 8, 24]
    assert load.is_measured.all()
    assert load._replace(warm_up_s=1.0, window_s=2.0).is_measured.sum() == 2


def test_a_queue_that_grows_is_an_overload() -> None:
    """Counted by hand: 20 requests arrive in the window, so growth of 2 is overload."""
    num = 30
    load = load_at(10.0, num, window_s=2.0)
    arrival = np.arange(num) / 10.0

    def run(delay_s: float, per_s: float) -> ServerRun:
        first = arrival + 0.01 + delay_s + per_s * arrival
        times = (x[None] for x in (arrival, first, first + 1.0))
        return ServerRun(load, *times, np.zeros(1), no_totals(1), None, None)

    assert not run(0.0, 0.0).is_overloaded().item()
    assert not run(0.5, 0.0).is_overloaded().item()
    assert run(0.0, 0.2).is_overloaded().item()


def test_another_policy_is_simulated() -> None:
    load = load_at(20.0, 90)
    server_runs = [
        simulate_server(SETUP, [load], constant_steps(), policy=policy)[0]
        for policy in (None, fcfs())
    ]
    # Neither policy lets a request wait in an idle server.
    for run in server_runs:
        assert run.latencies().first_token_s.max() < 0.021


def test_delays_of_a_request_are_added() -> None:
    load = load_at(20.0, 90)
    values = dict(ingest_s=0.5, first_token_s=0.25, stream_s=2.0)
    arrays = {name: np.full(1, x, np.float32) for name, x in values.items()}
    draws = constant_steps()
    prompt, late = (
        simulate_server(SETUP, [load], x)[0] for x in (draws, draws._replace(**arrays))
    )
    np.testing.assert_allclose(late.first_s - prompt.first_s, 0.75, atol=1e-6)
    np.testing.assert_allclose(late.finish_s - prompt.finish_s, 2.5, atol=1e-6)


class ShortestPrompt(NamedTuple):
    """Admits the shortest prompt first."""

    inner: FCFS
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        return plan_by(self.inner, counts, counts.waiting_tokens)


def test_a_policy_sees_the_whole_queue() -> None:
    """30 long requests come first; the shortest ones of the queue are served first."""
    num = 40
    is_long = np.arange(40) < 30
    load = make_server_load(
        1e-4 * np.arange(num),
        np.where(is_long, 32, 16),
        np.where(is_long, 60, 2),
        prefix_tokens=np.zeros(num, int),
        block_size=16,
        warm_up_s=0.0,
        window_s=1.0,
    )
    setup = dataclasses.replace(SETUP, max_num_seqs=2)
    (run,) = simulate_server(
        setup, [load], constant_steps(), policy=ShortestPrompt(fcfs()), num_slots=2
    )
    first_s = run.first_s[0]
    # Two long requests run when the short ones arrive, and each step serves the next.
    assert first_s[30:].max() < np.sort(first_s[:30])[2]


def test_requests_that_do_not_fit_are_refused() -> None:
    load = load_at(4.0, 20)
    median = draw_coefficients(np.zeros((1, len(PRIOR))))

    def refused(load: ServerLoad, message: str, **fields) -> None:
        with pytest.raises(ValueError, match=message):
            simulate_server(dataclasses.replace(SETUP, **fields), [load], median)

    refused(load, r"request 0 has 43 tokens, and max_model_len=42", max_model_len=42)
    refused(load._replace(resident_blocks=38), "need 41 blocks, and there are 40")
    large = {"model": shapes.describe("llama-2-13b"), "device": find_device("t4")}
    refused(load, "does not fit into 1 t4", num_blocks=None, **large)
    with pytest.raises(ValueError, match=r"window_s=1\.0 must be longer"):
        load_at(0.4, 1, window_s=1.0)


def test_power_is_that_of_the_shares() -> None:
    """100 steps of one sequence in 2 s of a window of 2 s, on a device of 700 W."""
    totals = no_totals(1)._replace(
        steps=np.array([100]),
        busy_s=np.array([2.0]),
        decoded=np.array([100]),
        drawn=np.array([100]),
    )
    load = load_at(1.0, 3)
    times = (np.zeros((1, 3)), np.zeros((1, 3)), np.full((1, 3), 3.0))
    run = ServerRun(load, *times, np.zeros(1), totals, None, None)
    energy = find_run_energy(SETUP, run, PowerShares(0.1, 0.5, 0.0))
    # Half of the bandwidth for weights of 13.2 GB without the embedding's rows.
    num_bytes = 100 * float(SETUP.cost(constant_steps()).counts.weight_bytes)
    used = num_bytes / 2 / SETUP.device.bandwidth
    assert 0.1 < used < 0.3
    assert energy.watts[0] == pytest.approx(700 * (0.1 + 0.5 * used), rel=1e-5)
    assert energy.token_joules[0] == pytest.approx(energy.watts[0] * 2 / 100)
    unknown = dataclasses.replace(SETUP, device=SETUP.device._replace(board_watts=0))
    assert np.isnan(find_run_energy(unknown, run).watts).all()
