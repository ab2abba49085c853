"""Logs of requests: reading, fitting, and times of a server that was measured."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxkv.scheduling import vllm_scheduler
from scaling import shapes
from scaling.calibration import (
    PRIOR,
    RequestLog,
    ServerSetup,
    draw_coefficients,
    fit_request_log,
    kolmogorov_distance,
    latencies_of,
    make_log_load,
    read_request_log,
    simulate_server,
)
from scaling.costs import find_device
from tests.support import traces

COLUMNS = (
    *("arrival_s", "prompt_tokens", "answer_tokens"),
    *("first_token_s", "last_token_s"),
)
ROWS: list[dict[str, object]] = [
    dict(zip(COLUMNS, (12.0, 9, 5, 13.0, 14.0), strict=True)),
    dict(zip(COLUMNS, (10.0, 7, 1, 11.0, 12.0), strict=True)),
]


def write_log(**cells: object) -> Path:
    rows = [dict(row) for row in ROWS]
    rows[0] |= cells
    path = Path("log.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_requests_are_sorted_by_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = read_request_log(write_log())
    np.testing.assert_array_equal(log.arrival_s, [0, 2])
    np.testing.assert_array_equal(log.prompt_tokens, [7, 9])
    np.testing.assert_array_equal(log.row, [2, 1])
    np.testing.assert_allclose(log.latencies_s, [[2, 2], [1, 1]])


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        ({"first_token_s": 11}, "row 1 (line 1): first_token_s=11 must be a number at"),
        ({"last_token_s": "?"}, "last_token_s='?' must be a number"),
        ({"answer_tokens": 0}, "answer_tokens=0 must be a number at least 1"),
        ({"last_token_s": 9000}, "must be at most 1; times must be in s"),
    ],
)
def test_bad_rows_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cells: dict[str, object],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(line)):
        read_request_log(write_log(**cells))


def test_a_log_without_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("arrival_s,prompt_tokens,answer_tokens\n0,3,4\n1,3,4\n")
    with pytest.raises(ValueError, match="needs first_token_s, last_token_s; a log of"):
        read_request_log(path)


BENCHMARK = {
    "start_times": [5.0, 3.0],
    "input_lens": [7, 9],
    "output_lens": [3, 2],
    "ttfts": [0.5, 0.25],
    "itls": [[0.1, 0.2], [0.3]],
    "errors": ["", ""],
}


def test_the_result_of_a_benchmark_is_a_log(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(BENCHMARK))
    log = read_request_log(path)
    np.testing.assert_array_equal(log.row, [2, 1])
    np.testing.assert_array_equal(log.arrival_s, [0, 2])
    np.testing.assert_allclose(log.latencies_s, [[0.55, 0.8], [0.25, 0.5]])


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"input_lens": None}, "needs input_lens, output_lens"),
        ({"start_times": [1.0]}, "start_times must have 2 numbers"),
        ({"ttfts": [1]}, "of equal lengths"),
        ({"errors": ["", "reset"]}, "request 2 failed: reset"),
        ({"itls": [[0.1], ["x"]]}, "request 2: ttfts and itls must be numbers"),
        ({"start_times": [1.0, "x"]}, "request 2: start_times must be numbers"),
        ({"start_times": None, "request_rate": 4.0}, "request_rate=4.0 sends"),
    ],
)
def test_bad_benchmarks_are_refused(
    tmp_path: Path, fields: dict[str, object], line: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(BENCHMARK | fields))
    with pytest.raises(ValueError, match=re.escape(line)):
        read_request_log(path)


SGLANG = {
    "backend": "sglang",
    "request_rate": float("inf"),
    "max_concurrency": 2,
    "input_lens": [9, 7, 11, 5],
    "output_lens": [3, 2, 2, 1],
    "ttfts": [0.5, 0.25, 0.125, 0.25],
    "itls": [[0.25, 0.25], [0.25], [0.25], []],
    "generated_texts": ["a", "b", "c", "d"],
    "errors": ["", "", "", ""],
}
"""Two requests run at a time: the second ends at 0.5 and the third at 0.875 s."""


def test_the_result_of_a_closed_loop_has_its_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    path.write_text(json.dumps(SGLANG) + "\n")
    log = read_request_log(path)
    np.testing.assert_array_equal(log.row, [1, 2, 3, 4])
    np.testing.assert_allclose(log.arrival_s, [0, 0, 0.5, 0.875])
    np.testing.assert_allclose(log.last_token_s, [1.0, 0.5, 0.875, 1.125])
    path.write_text(json.dumps(SGLANG | {"max_concurrency": None}))
    np.testing.assert_array_equal(read_request_log(path).arrival_s, 0)
    path.write_text(2 * (json.dumps(SGLANG) + "\n"))
    with pytest.raises(ValueError, match="has 2 results of a benchmark"):
        read_request_log(path)
    path.write_text(json.dumps(SGLANG | {"max_concurrency": 0}))
    with pytest.raises(ValueError, match="max_concurrency=0 must be at least 1"):
        read_request_log(path)


def test_distance_of_distributions() -> None:
    assert kolmogorov_distance(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == 0
    assert kolmogorov_distance(np.array([1.0, 2]), np.array([3.0, 4])) == 1
    distance = kolmogorov_distance(np.array([1.0, 2, 3, 4]), np.array([2.5, 9]))
    assert distance == pytest.approx(0.5)


SETUP = ServerSetup(
    model=shapes.describe("llama-3.1-8b"),
    device=find_device("rtx-pro-6000"),
    max_model_len=8192,
)


@pytest.mark.slow
def test_a_fit_finds_the_coefficients_of_a_simulated_log() -> None:
    rng = np.random.default_rng(3)
    num = 80
    arrival_s = np.cumsum(rng.exponential(0.1, num))
    empty = np.zeros(num)
    log = RequestLog(
        arrival_s - arrival_s[0],
        rng.integers(200, 900, num),
        rng.integers(20, 120, num),
        empty,
        empty,
        np.arange(1, num + 1),
    )
    truth = np.zeros(len(PRIOR))
    truth[[*PRIOR].index("weight_share")] = -1.5
    truth[[*PRIOR].index("step_s")] = 1.0
    (run,) = simulate_server(
        SETUP, [make_log_load(log, SETUP)], draw_coefficients(truth[None])
    )
    log = log._replace(first_token_s=run.first_s[0], last_token_s=run.finish_s[0])
    posterior = fit_request_log(log, SETUP, num_fitted=60, num_draws=4)
    (again,) = simulate_server(
        SETUP, [make_log_load(log, SETUP)], draw_coefficients(posterior.mode[None])
    )
    error = np.log(latencies_of(again)[0] / log.latencies_s)
    assert np.abs(error[0, 60:]).max() < 0.02
    assert abs(error[1, 60:].mean()) < 0.02
    # The link of one device has no effect: its coefficient keeps the prior.
    assert posterior.mode[[*PRIOR].index("link_share")] == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_the_second_half_of_a_measured_log_is_predicted() -> None:
    """The bars are 2 % end to end, 5 % at the first token, and a distance of 0.15."""
    path = traces.find("servers2026/requests_rtxpro6000_llama-3.1-8b.csv")
    log = read_request_log(path)
    policy = vllm_scheduler(max_num_seqs=128, rule="vllm-0.19")
    posterior = fit_request_log(log, SETUP, num_fitted=150, policy=policy)
    (run,) = simulate_server(
        SETUP,
        [make_log_load(log, SETUP)],
        draw_coefficients(posterior.deviations),
        policy=policy,
        num_slots=128,
    )
    predicted = np.median(latencies_of(run), axis=0)[:, 150:]
    measured = log.latencies_s[:, 150:]
    errors = predicted.mean(axis=1) / measured.mean(axis=1) - 1
    assert np.all(np.abs(errors) < [0.02, 0.05])
    for one, other in zip(predicted, measured, strict=True):
        assert kolmogorov_distance(one, other) < 0.15
