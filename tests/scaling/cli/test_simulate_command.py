"""`jaxkv simulate`: options, document, tables, figures, and errors."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.memory import linear_eviction
from jaxkv.report import RunTrace
from jaxkv.simulation import Totals
from scaling.calibration import (
    PRIOR,
    LatencySummary,
    LoadSizes,
    MeasuredStage,
    RequestLog,
    ServerCoefficients,
    ServerLoad,
    ServerPosterior,
    ServerRun,
    ServerSetup,
    StageLatencies,
    find_latency_factors,
    load_posterior,
    make_log_load,
    save_posterior,
)
from scaling.cli.simulate import command, drawing, stages
from scaling.cli.simulate.case import ServerCase, resolve_server_case
from scaling.cli.simulate.options import (
    LatencyObjective,
    SimulateOptions,
    parse_objectives,
    parse_sweep,
)
from scaling.cli.simulate.summary import RunSummary, find_largest_rates
from scaling.costs import find_device, kv_bytes_per_token
from scaling.shapes import describe
from tests.support.commands import (
    Command,
    assert_nothing_heavy_is_imported,
    assert_refused,
    document,
    words,
)
from tests.support.figures import draw_sheet, faults
from tests.support.folders import GOLDEN
from tests.support.mutation import replace

STEP_S = 0.02


@pytest.fixture
def simulate(jaxkv: Command) -> Command:
    """The command, with coefficients of Mixtral on an H100 in `fit.json`."""
    rng = np.random.default_rng(0)
    posterior = ServerPosterior(
        deviations=0.1 * rng.normal(size=(4, len(PRIOR))),
        residuals={"mixtral-8x7b": 0.01 * rng.normal(size=(4, 2))},
        num_stages={"mixtral-8x7b": 6},
        stages=("a/0", "a/1"),
        mode=np.zeros(len(PRIOR)),
        corrections=np.zeros((2, 2)),
        num_effective=100.0,
        devices=("h100",),
    )
    save_posterior(Path("fit.json"), posterior)
    return lambda *args: jaxkv("simulate", *args, "--coefficients", "fit.json")


def serve_one_by_one(
    setup: ServerSetup,
    loads: tuple[ServerLoad, ...],
    coefficients: ServerCoefficients,
    **_: Any,
) -> list[ServerRun]:
    """A server with a queue, a first token after 20 ms, and steps of 20 ms."""
    runs = []
    slower = 1 + 0.1 * np.arange(np.size(coefficients.step_s))
    for load in loads:
        seconds, micros = np.asarray(load.workload.arrival).T
        arrival_s = seconds + micros * 1e-6
        output = np.asarray(load.workload.output)
        first = np.zeros((slower.size, arrival_s.size))
        for draw, factor in enumerate(slower):
            free_s = 0.0
            for i, arrived_s in enumerate(arrival_s):
                free_s = max(free_s, arrived_s) + STEP_S * factor
                first[draw, i] = free_s
        finish = first + STEP_S * slower[:, None] * (output - 1)
        used = np.full(slower.size, 0.25)
        totals = Totals(*(np.full(slower.size, 100.0) for _ in Totals._fields))
        steps = np.broadcast_to(np.arange(0.0, 200.0), (slower.size, 200))
        runs.append(
            ServerRun(
                load,
                np.broadcast_to(arrival_s, first.shape),
                first,
                finish,
                used,
                totals,
                steps,
                np.broadcast_to(0.2 + 0.001 * steps, steps.shape),
            )
        )
    return runs


def write_request_log(num: int = 30, slower: float = 1.0) -> list[str]:
    """Writes a log of `serve_one_by_one`; returns the arguments that compare it."""
    arrival_s = 0.03 * np.arange(num)
    prompt, answer = np.full(num, 64), np.full(num, 11)
    empty = np.zeros(num)
    log = RequestLog(arrival_s, prompt, answer, empty, empty, np.arange(num))
    setup = ServerSetup(
        model=describe("mixtral-8x7b"), device=find_device("h100"), max_model_len=4096
    )
    draws = ServerCoefficients(*(np.zeros(1) for _ in PRIOR))
    (run,) = serve_one_by_one(setup, (make_log_load(log, setup),), draws)
    first_s = arrival_s + slower * (run.first_s[0] - arrival_s)
    last_s = arrival_s + slower * (run.finish_s[0] - arrival_s)
    lines = ["arrival_s,prompt_tokens,answer_tokens,first_token_s,last_token_s"]
    for row in zip(arrival_s, prompt, answer, first_s, last_s, strict=True):
        lines.append(",".join(map(str, row)))
    Path("log.csv").write_text("\n".join(lines))
    return ["mixtral-8x7b", "--tp", "2", "--trace", "log.csv", "--compare"]


@pytest.fixture
def queue(simulate: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command with a queue in place of the simulated server."""
    replace(monkeypatch, command, "simulate_server", serve_one_by_one)
    lengths = ("--prompt-tokens", "64", "--answer-tokens", "11")
    return lambda *args: simulate("Mixtral-8x7B", "--tp", "2", *lengths, *args)


def resolved(*lengths: str, **fields: Any) -> ServerCase:
    prompt, answer = lengths
    options = SimulateOptions(
        tp=2,
        prompt_tokens=prompt,
        answer_tokens=answer,
        coefficients=Path("fit.json"),
        **fields,
    )
    return resolve_server_case("mixtral-8x7b", options)


def test_requests_are_compared_with_a_log(
    simulate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, command, "simulate_server", serve_one_by_one)
    # The draws are 1 to 1.3 times as slow as the server.
    report = document(simulate, *write_request_log(slower=1.15), "--plot")
    comparison = report["comparison"]
    assert report["num_requests"] == 30
    assert comparison["e2e"]["statistics"].keys() == {"mean", "p50", "p90"}
    mean = comparison["e2e"]["statistics"]["mean"]
    assert mean["measured_s"] == pytest.approx(1.15 * 0.22)
    assert mean["predicted_s"] == pytest.approx(mean["measured_s"], rel=0.05)
    assert mean["is_covered"]
    assert comparison["e2e"]["median_absolute_error"] < 0.02
    assert len(comparison["ttft"]["farthest"]) == 5
    assert (Path(report["out"]) / "figure-3.png").exists()
    other = document(simulate, *write_request_log(slower=3.0))["comparison"]["e2e"]
    assert other["kolmogorov_distance"] == 1
    assert other["statistics"]["mean"]["error"] == pytest.approx(-0.62, abs=0.02)


def test_the_document_of_a_load(queue: Command) -> None:
    more = ("--objective", "ttft=0.5,e2e_mean=0.275", "--usd-per-hour", "3")
    more += ("--grams-per-kwh", "360")
    report = document(queue, "--rate", "8", *more)
    # Two devices at 3 dollars an hour.
    usd = 6 / 3600 / report["requests_per_s"]
    assert report["usd"]["per_answer"] == pytest.approx(usd)
    assert report["usd"]["per_million_tokens"] == pytest.approx(1e6 * usd / 11)
    energy = report["energy"]
    assert energy["joules_per_answer"] == pytest.approx(11 * energy["joules_per_token"])
    # 360 g for 3.6 MJ.
    for name in ("answer", "million_tokens"):
        grams = energy[f"joules_per_{name}"] * 1e-4
        assert energy[f"grams_per_{name}"] == pytest.approx(grams)
    assert report["model"] == "mixtral-8x7b"
    assert (report["window_s"], report["warm_up_s"]) == (25.0, 8.0)
    assert report["num_requests"] > 150
    for name in ("e2e_s", "ttft_s", "tpot_s"):
        values = [report[name][x] for x in ("mean", "p50", "p90", "p99")]
        assert values[1] <= values[2] <= values[3]
        for statistic, value in zip(("mean", "p50", "p90", "p99"), values, strict=True):
            low, high = report[name]["interval"][statistic]
            assert low <= value <= high
    # Steps of the four draws are 20 to 26 ms.
    assert report["tpot_s"]["p50"] == pytest.approx(0.023, rel=0.03)
    assert report["requests_per_s"] == pytest.approx(8, rel=0.1)
    assert report["tokens_per_s"] == pytest.approx(11 * report["requests_per_s"])
    # The mean end-to-end times of the four draws are 0.22 to 0.29 s.
    assert 0.5 < report["objective_probability"] < 0.9
    assert 0 < report["goodput"]["per_s"] < 8
    memory = report["memory"]
    # The share grows by 0.1 % each second, from 8 to 33 s.
    assert memory["peak_share"] == pytest.approx(0.232)
    assert memory["mean_share"] == pytest.approx(0.2 + 0.001 * 20, abs=1e-3)
    assert report["fitted"]["has_model"]
    assert report["fitted"]["devices"] == ["h100"]


def test_a_sweep_finds_the_largest_rates(queue: Command) -> None:
    args = ("--sweep", "rate=10:60:11", "--objective", "ttft=1")
    report = document(queue, *args)
    rows = report["rows"]
    assert [x["rate_per_s"] for x in rows] == [10.0 + 5 * k for k in range(11)]
    probability = [x["objective_probability"] for x in rows]
    assert probability[0] == 1.0
    assert probability[-1] == 0.0
    # The draws serve 38 to 50 requests per second.
    largest = report["largest_rate_per_s"]
    assert 30 < largest["0.9"]["rate"] < largest["0.5"]["rate"]
    assert largest["0.5"]["rate"] < largest["0.1"]["rate"] < 55
    assert {x["relation"] for x in largest.values()} == {"is"}
    assert rows[0]["overloaded_share"] == 0.0
    assert rows[-1]["overloaded_share"] == 1.0
    output = words(queue, *args)
    for part in (
        "Objective: ttft p99 <= 1 s",
        "25 s after a warm-up of 8 s",
        "mixtral-8x7b is one of the fitted models",
        "percentiles",
    ):
        assert part in output


def test_statistics_are_those_of_a_loop(simulate: Command) -> None:
    case = resolved("64", "11", rate=8.0, objective="ttft_p90=0.031,tpot_mean=0.021")
    (run,) = serve_one_by_one(
        case.setup, case.loads, ServerCoefficients(*np.zeros((17, 4)))
    )
    summary = RunSummary(case, run)
    draws = find_latency_factors(case.posterior, "mixtral-8x7b").draw(64)
    met = 0
    good = 0.0
    p90 = []
    begin = 8.0
    end = 33.0
    output = np.asarray(run.load.workload.output)
    for factors in draws:
        for draw, (end_to_end_factor, early) in enumerate(factors):
            first = []
            gaps = []
            within = 0
            for i, arrived in enumerate(run.arrival_s[draw]):
                if not begin <= arrived < end:
                    continue
                first.append(early * (run.first_s[draw, i] - arrived))
                spent = run.finish_s[draw, i] - run.first_s[draw, i]
                gaps.append(end_to_end_factor * spent / (output[i] - 1))
                within += first[-1] <= 0.031 and gaps[-1] <= 0.021
            p90.append(np.percentile(first, 90))
            met += p90[-1] <= 0.031 and np.mean(gaps) <= 0.021
            good += within / 25.0
    assert 0 < met < draws[..., 0].size
    assert summary.probability(case.objectives) == met / draws[..., 0].size
    samples = summary.goodput(case.objectives)
    assert samples is not None
    assert samples.mean() == pytest.approx(good / draws[..., 0].size)
    report = summary.document(8.0)
    assert report["ttft_s"]["p90"] == pytest.approx(np.median(p90))
    low, high = report["ttft_s"]["interval"]["p90"]
    assert [low, high] == pytest.approx(np.quantile(p90, [0.05, 0.95]).tolist())


def test_percentiles_need_requests(queue: Command) -> None:
    report = document(
        queue, "--rate", "2", "--duration", "20", "--arrivals", "constant"
    )
    assert report["num_requests"] == 40
    assert report["ttft_s"]["p99"] is None
    assert report["ttft_s"]["interval"]["p99"] is None
    assert report["ttft_s"]["p90"] is not None
    # A low rate has a longer window.
    assert document(queue, "--rate", "2")["window_s"] == 100.0


def test_loads_of_a_sweep_are_the_same_requests_faster(simulate: Command) -> None:
    case = resolved("alpaca", "alpaca", sweep="rate=4:8:2", max_model_len=512)
    slow, fast = (load.workload for load in case.loads)
    num = min(x.prompt.size for x in (slow, fast))
    np.testing.assert_array_equal(slow.prompt[:num], fast.prompt[:num])
    np.testing.assert_array_equal(slow.output[:num], fast.output[:num])
    times = [np.asarray(x.arrival[:num]) @ np.array([1, 1e-6]) for x in (slow, fast)]
    np.testing.assert_allclose(times[0], 2 * times[1], rtol=1e-4)
    assert np.mean(slow.prompt) == pytest.approx(19.31, rel=0.1)
    assert np.mean(slow.output) == pytest.approx(58.45, rel=0.15)
    assert (slow.prompt + slow.output).max() <= 512


@pytest.mark.slow
def test_a_server_of_layers_of_different_sizes_is_simulated(simulate: Command) -> None:
    """Within its windows, whose pages hold K and V of the layers that have them."""
    lengths = "--rate 2 --prompt-tokens 3 --answer-tokens 2"
    folder = str(GOLDEN / "gemma4")
    report = document(simulate, folder, *lengths.split())
    assert 0 < report["ttft_s"]["mean"] < report["e2e_s"]["mean"] < 1
    case = resolve_server_case(
        folder, SimulateOptions(rate=2.0, prompt_tokens="3", answer_tokens="2")
    )
    blocks = case.setup.num_kv_blocks
    room = blocks * 16 * kv_bytes_per_token(case.setup.model)
    assert 0.8 < room / case.setup.device.memory_bytes < 0.9
    line = "max_length=7 must be at most 6, the window of gemma4"
    assert_refused(simulate, f"{folder} {lengths} --max-model-len 7", line)


def test_a_prefix_is_cached_in_whole_blocks(simulate: Command) -> None:
    (load,) = resolved("64", "11", rate=8.0, prefix_tokens=100).loads
    assert load.workload.context is not None
    assert set(np.asarray(load.workload.context)) == {96}
    assert set(np.asarray(load.workload.prompt)) == {68}
    assert load.resident_blocks == 6
    (cold,) = resolved(
        "64", "11", rate=8.0, prefix_tokens=100, prefix_caching=False
    ).loads
    assert set(np.asarray(cold.workload.prompt)) == {164}
    assert cold.resident_blocks == 0


def test_a_trace_is_cut_to_its_window(simulate: Command) -> None:
    lines = [f"{0.5 * k},{20 + k},{5 + k}" for k in range(60)]
    Path("t.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines)
    )
    case = resolved("", "", trace=Path("t.csv"), warm_up=2.0, num_requests=10)
    (load,) = case.loads
    at = load.is_measured
    assert np.asarray(load.workload.prompt)[at].tolist() == list(range(24, 34))
    # Requests after the window continue the load.
    assert np.asarray(load.workload.prompt).size > 14
    assert case.rates[0] == pytest.approx(2.0, rel=0.15)
    fast = resolved("", "", trace=Path("t.csv"), rate=4.0)
    assert fast.loads[0].is_measured.sum() == 60
    assert fast.rates == (4.0,)


def test_a_trace_repeats_prompts_that_are_cached(simulate: Command) -> None:
    rows = [
        {"timestamp": 500 * k, "input_length": 1024, "output_length": 5}
        | {"hash_ids": [1, 2 + k % 2]}
        for k in range(8)
    ]
    Path("t.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    (cold,) = resolved("", "", trace=Path("t.jsonl")).loads
    assert cold.workload.context is None
    (load,) = resolved("", "", trace=Path("t.jsonl"), cache_tokens=4096).loads
    assert load.workload.context is not None
    context = np.asarray(load.workload.context)
    assert (context + np.asarray(load.workload.prompt) == 1024).all()
    assert context[:2].tolist() == [0, 512]
    assert context[2:].min() >= 512
    assert load.resident_blocks == 256


SESSIONS = """\
arrival_s,prompt_tokens,output_tokens,session,delay_s
0,40,11,a,0
1,30,11,b,0
2,60,11,a,3
9,80,11,a,5
"""


@pytest.mark.thorough
def test_turns_of_sessions_wait_for_answers(simulate: Command) -> None:
    Path("s.csv").write_text(SESSIONS)
    report = document(simulate, "mixtral-8x7b", "--tp", "2", "--trace", "s.csv")
    assert report["num_requests"] == 4
    assert report["overloaded_share"] == 0
    sessions = report["sessions"]
    assert sessions["num"] == 2
    # Session a takes 8 s of delays and three answers, session b one answer.
    served_s = 2 * sessions["duration_s"]["mean"] - 8
    assert served_s == pytest.approx(4 * report["e2e_s"]["mean"], rel=0.1)


def test_sessions_are_not_cut(simulate: Command) -> None:
    Path("s.csv").write_text(SESSIONS)
    args = "mixtral-8x7b --tp 2 --trace s.csv --duration 3"
    assert_refused(simulate, args, "--duration and the sessions of s.csv exclude")


def test_flags_name_the_units_of_a_trace(simulate: Command) -> None:
    rows = "".join(f"{500 * k},20,5\n" for k in range(60))
    Path("t.csv").write_text("timestamp,prompt_tokens,output_tokens\n" + rows)
    args = "mixtral-8x7b --tp 2 --trace t.csv"
    assert_refused(simulate, args, "or give --time-unit 's', 'ms' or 'us'")
    (load,) = resolved("", "", trace=Path("t.csv"), time_unit="ms").loads
    assert load.window_s == pytest.approx(29.5, abs=0.1)
    lines = [
        {"timestamp": 500 * k, "input_length": 60 + 10 * k, "output_length": 5}
        | {"hash_ids": [1, 2][: k + 1]}
        for k in range(2)
    ]
    Path("t.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    args = "mixtral-8x7b --tp 2 --trace t.jsonl"
    assert_refused(simulate, args, "such as --chunk-tokens 64")
    assert_refused(simulate, f"{args} --chunk-tokens 0", "--chunk-tokens 0: must be")
    resolved("", "", trace=Path("t.jsonl"), chunk_tokens=64, cache_tokens=64)
    unit = "--time-unit ms --cache-tokens 64"
    line = "t.csv: --cache-tokens 64 needs hash_ids"
    assert_refused(simulate, f"mixtral-8x7b --tp 2 --trace t.csv {unit}", line)


def test_doubts_about_a_trace_and_its_load_are_shown(
    simulate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, command, "simulate_server", serve_one_by_one)
    posterior = load_posterior(Path("fit.json"))
    low = LoadSizes(10.0, 4.0, 0.001)
    high = LoadSizes(40.0, 5.0, 50.0)
    save_posterior(Path("fit.json"), posterior._replace(fitted_sizes=(low, high)))
    lines = [f"{0.5 * k},20,16" for k in range(60)] + ["1787600000,20,16"]
    Path("t.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines)
    )
    args = ("mixtral-8x7b", "--tp", "2", "--trace", "t.csv", "--num-requests", "40")
    report = document(simulate, *args)
    (doubt,) = report["doubts"]
    assert doubt.startswith("line 62: arrival_s=1787600000 is ")
    outside = {"answer_tokens": {"value": 16.0, "low": 4.0, "high": 5.0}}
    assert report["outside_fitted"] == outside
    output = words(simulate, *args)
    assert "warning: answers of 16 tokens, and 4 to 5 were fitted" in output
    assert "warning: line 62: arrival_s=1787600000 is 20,689.8 days" in output


def test_objectives_and_sweeps_are_parsed() -> None:
    assert parse_objectives("ttft=0.5, tpot_p90=0.05,e2e_mean=9") == (
        LatencyObjective("ttft", "p99", 0.5),
        LatencyObjective("tpot", "p90", 0.05),
        LatencyObjective("e2e", "mean", 9.0),
    )
    assert parse_objectives("") == ()
    assert parse_sweep("rate=1:40:3") == (1.0, 20.5, 40.0)


def test_largest_rates_are_interpolated_or_bounds() -> None:
    largest = find_largest_rates((1.0, 2.0, 3.0), [1.0, 0.8, 0.3])
    assert largest[0.9].rate == pytest.approx(1.5)
    assert largest[0.5].rate == pytest.approx(2.6)
    assert (largest[0.1].rate, largest[0.1].relation) == (3.0, "at least")
    largest = find_largest_rates((1.0, 2.0), [0.4, 0.2])
    assert {x.text for x in largest.values()} == {"< 1", "> 2"}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("", "MODEL is missing"),
        ("mixtral-8x7", "did you mean mixtral-8x7b"),
        ("mixtral-8x7b --rate 1", "--prompt-tokens is missing"),
        ("mixtral-8x7b --rate 1 --prompt-tokens 9", "--answer-tokens is missing"),
        ("LOAD --tp 2", "--rate is missing"),
        ("LOAD --tp 2 --objective ttft=1", "--rate is missing"),
        ("LOAD --rate 2", "a tensor-parallel degree of 2 is enough"),
        ("LOAD --rate 2 --gpu-memory-utilization 1.5", "1.5: must be in (0, 1]"),
        (
            "LOAD --rate 2 --gpu-memory-utilization 0.8 --num-blocks 9",
            "--num-blocks and --gpu-memory-utilization exclude each other",
        ),
        ("LOAD --rate 2 --tp 2 --time-unit ms", "--time-unit needs --trace"),
        ("LOAD --rate 2 --tp 2 --compare", "--rate and --compare exclude each other"),
        ("LOAD --tp 2 --compare", "--compare needs --trace, a log of requests"),
        ("LOAD --rate 2 --tp 2 --fit-requests 3", "exclude each other"),
        ("LOAD --rate -2", "--rate -2: must be above 0"),
        ("LOAD --rate 2 --prompt-tokens=-5", "--prompt-tokens -5: must be a whole"),
        ("LOAD --rate 2 --answer-tokens 0", "--answer-tokens 0: must be a whole"),
        ("LOAD --rate 2 --prefix-tokens=-1", "--prefix-tokens -1: must be"),
        ("LOAD --rate 2 --parallel pp=2", "has tensor parallelism only"),
        ("LOAD --rate 2 --tp 2 --devices 4", "replicas are not simulated"),
        ("LOAD --rate 2 --tp 2 --dtype float8", "fitted in 16 bits"),
        ("LOAD --rate 2 --tp 2 --device a1", "unknown device 'a1'"),
        ("LOAD --rate 2 --tp 2 --sweep rate=1:2:3", "exclude each other"),
        ("LOAD --tp 2 --sweep rate=1:2:3 --record x", "--record and --sweep exclude"),
        ("LOAD --tp 2 --sweep rate=3:2:3", "with 0 < LOW < HIGH"),
        ("LOAD --tp 2 --sweep batch=1:2:3", "must be rate=LOW:HIGH:NUMBER"),
        ("LOAD --rate 2 --objective ttft", "needs a limit above 0 s"),
        ("LOAD --rate 2 --objective itl=1", "must be one of e2e, ttft, tpot"),
        ("LOAD --rate 2 --tp 2 --draws 9", "the coefficients have 4"),
        ("LOAD --rate 2 --tp 2 --max-model-len 99", "must be at least 640"),
        (
            "LOAD --rate 2 --tp 2 --num-requests 50 --objective ttft=1",
            "needs 100 requests in the window",
        ),
        ("LOAD --rate 2 --tp 2 --trace t.csv", "and --trace exclude each other"),
        (
            "LOAD --rate 2 --tp 2 --policy prefill-first --max-num-batched-tokens 600",
            "must be at least 640 for whole prompts",
        ),
        ("LOAD --rate 2 --tp 2 --cache-tokens 9", "--cache-tokens needs --trace"),
        ("mixtral-8x7b --stages s.csv", "--stages has the models of its rows"),
        ("--stages s.csv --rate 2", "--rate and --stages exclude each other"),
    ],
)
def test_invalid_options_are_refused(simulate: Command, args: str, line: str) -> None:
    load = "mixtral-8x7b --prompt-tokens 512 --answer-tokens 128"
    assert_refused(simulate, args.replace("LOAD", load), line)


def test_coefficients_of_another_version_are_refused(simulate: Command) -> None:
    fields = json.loads(Path("fit.json").read_text())
    Path("fit.json").write_text(json.dumps(fields | {"cost_version": 7}))
    load = "mixtral-8x7b --tp 2 --rate 2 --prompt-tokens 9 --answer-tokens 9"
    assert_refused(simulate, load, "fit.json: cost_version=7 must be 1")


def test_another_device_is_a_warning(queue: Command) -> None:
    output = words(queue, "--rate", "8", "--device", "h200")
    assert "warning: no stage on h200 was fitted" in output


def test_help_does_not_import_jax() -> None:
    assert_nothing_heavy_is_imported("simulate --help")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields", [{"rate": 8.0}, {"sweep": "rate=30:60:4", "objective": "ttft=1"}]
)
def test_the_figure_follows_the_rules(
    simulate: Command, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    case = resolved("64", "11", **fields)
    draws = ServerCoefficients(*np.zeros((17, 4)))
    runs = serve_one_by_one(case.setup, case.loads, draws)
    summaries = [RunSummary(case, run) for run in runs]
    rows = [x.document(rate) for x, rate in zip(summaries, case.rates, strict=True)]
    largest = {}
    if case.objectives:
        probabilities = [x["objective_probability"] for x in rows]
        largest = find_largest_rates(case.rates, probabilities)
    sheet = draw_sheet(
        lambda: drawing.render_simulation(case, summaries, rows, largest), monkeypatch
    )
    assert len(sheet.axes) == 3
    assert not faults(sheet)


@pytest.mark.thorough
def test_a_server_is_simulated(simulate: Command) -> None:
    """A sweep has the numbers of its rates, one by one; files are written."""
    args = (
        *("Mixtral-8x7B", "--tp", "2", "--prompt-tokens", "64"),
        *("--answer-tokens", "9", "--duration", "4", "--warm-up", "1", "--draws", "2"),
    )
    swept = document(simulate, *args, "--sweep", "rate=5:10:2", "--out", "here")
    assert json.loads(Path("here/simulate.json").read_text())["rows"] == swept["rows"]
    single = document(simulate, *args, "--rate", "10", "--record", "run.npz")
    trace = RunTrace.read("run.npz")
    assert trace.info.num_emitted.sum() == 9 * len(trace.requests)
    assert (trace.info.reason > 0).sum() == len(trace.requests)
    for name in ("e2e_s", "ttft_s", "tpot_s"):
        assert single[name] == swept["rows"][1][name]
    assert single["requests_per_s"] == swept["rows"][1]["requests_per_s"]
    # Nine tokens of 10 to 25 ms each.
    assert 0.08 < single["e2e_s"]["mean"] < 0.3
    assert 0 < single["memory"]["mean_share"] < single["memory"]["peak_share"] < 0.1


NEVER = """
from typing import NamedTuple
import jaxkv

class Never(NamedTuple):
    holds_finished = False
    def plan(self, counts):
        hidden = counts.waiting & (counts.waiting_tokens < 10)
        return jaxkv.fcfs().plan(counts._replace(waiting=hidden))
"""


@pytest.mark.thorough
def test_a_policy_is_tested_by_random_loads(jaxkv: Command) -> None:
    Path("never.py").write_text(NEVER)
    args = ("simulate", "--verify", "--policy", "never.py:Never")
    status, out, _ = jaxkv(*args, "--json")
    assert status == 1
    report = json.loads(out)
    assert report["holds"] is False
    fault = report["fault"]
    assert fault["check"] == "every request ends"
    assert "no request is admitted" in fault["reason"]
    assert [x["prompt"] >= 10 for x in fault["requests"]] == [True]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--verify --policy no.py:Never", "no.py: no such file"),
        ("--verify --rate 3", "--rate and --verify exclude each other"),
        ("llama-2-7b --verify", "llama-2-7b: --verify has a small random model"),
    ],
)
def test_invalid_tests_of_policies_are_refused(
    jaxkv: Command, words: str, line: str
) -> None:
    assert_refused(jaxkv, f"simulate {words}", line)


@pytest.mark.slow
def test_each_policy_has_its_own_schedule(simulate: Command) -> None:
    args = ("llama-2-7b", "--prompt-tokens", "900", "--answer-tokens", "9")
    args += ("--rate", "30", "--duration", "4", "--warm-up", "1", "--draws", "2")
    means_s = [
        document(simulate, *args, "--policy", name)["e2e_s"]["mean"]
        for name in ("fcfs", "prefill-first", "static")
    ]
    assert len({*means_s}) == 3
    # A file with the policy of a name simulates alike.
    Path("mine.py").write_text("import jaxkv\n\ndef make():\n    return jaxkv.fcfs()\n")
    mine = document(simulate, *args, "--policy", "mine.py:make")["e2e_s"]["mean"]
    assert mine == means_s[0]
    rules = scheduling.linear_score(), linear_eviction(recency=0.5)
    Path("rules.json").write_text(scheduling.format_linear_score(*rules))
    (doubt,) = document(simulate, *args, "--policy", "rules.json")["doubts"]
    assert doubt.startswith("the eviction of rules.json changes nothing")
    # Policies by attributes that these loads do not have.
    assert_refused(simulate, " ".join((*args, "--policy", "fair-share")), "fair-share")


@pytest.mark.thorough
def test_a_table_of_servers_has_signed_errors(jaxkv: Command) -> None:
    """By the published fit, which saw these rows."""
    table = str(GOLDEN / "aic_servers.csv")
    report = document(jaxkv, "simulate", "--stages", table, "--plot")
    assert (Path(report["out"]) / "figure-2.png").exists()
    page = (Path(report["out"]) / "report.md").read_text()
    assert "errors by device" in page
    assert re.search(r"(\d+) of \1 rows are of models that public_servers.json", page)
    assert "![figure](figure.png)" in page
    rows = [x for x in report["errors"] if x["by"] == "device"]
    assert {row["quantity"] for row in rows} >= {"time per token", "first token"}
    assert all(abs(row["bias"]) <= row["median"] for row in rows)
    # Data sheets are too fast.
    assert all(-1 < row["roofline"] < -0.2 for row in rows)
    assert report["refusals"]


def test_the_rows_of_a_table_are_predicted(
    simulate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(
        stage: MeasuredStage, posterior: ServerPosterior, *, seed: int
    ) -> StageLatencies:
        """Times with factors of 0.9 to 1.2 of 0.5 s, 20 ms and 6 ms."""
        factor = np.linspace(0.9, 1.2, len(posterior.deviations))
        times = (x * factor for x in (0.5, 0.02, 0.006))
        return StageLatencies(*(LatencySummary(x, 0.99 * x, 2 * x) for x in times))

    replace(monkeypatch, stages, "predict_stage", predict)
    table = str(GOLDEN / "vllm_stages.csv")
    report = document(simulate, "--stages", table)
    first, second = report["rows"]
    assert (first["model"], second["model"]) == ("llama-2-7b", "mixtral-8x7b")
    assert (first["is_overloaded"], second["is_overloaded"]) == (False, True)
    # Measured were 0.5 s in the mean, and 19 ms in the median.
    assert report["num_judged"] == 1
    assert first["e2e_s"]["mean"] == pytest.approx(0.525)
    assert first["e2e_s"]["error"] == pytest.approx(0.05)
    assert first["ttft_s"]["median"] == pytest.approx(0.99 * 0.021)
    assert first["ttft_s"]["error"] == pytest.approx(0.99 * 21 / 19 - 1)
    factors = np.quantile(np.linspace(0.9, 1.2, 4), [0.05, 0.95])
    assert first["e2e_s"]["interval"]["mean"] == pytest.approx(0.5 * factors)
    assert [report["coverage"][x] for x in ("e2e_s", "ttft_s")] == [1.0, 1.0]
    assert report["largest_error"]["e2e_s"] == pytest.approx(0.05)
    # Prompts of 190 tokens and answers of 41; 2.6 requests are in the system.
    posterior = load_posterior(Path("fit.json"))
    sizes = LoadSizes(100.0, 200.0, 1.0), LoadSizes(200.0, 250.0, 9.0)
    save_posterior(Path("fit.json"), posterior._replace(fitted_sizes=sizes))
    outside = document(simulate, "--stages", table)["rows"][0]["outside_fitted"]
    assert outside == {"answer_tokens": {"value": 41, "low": 200.0, "high": 250.0}}
    output = words(simulate, "--stages", table)
    assert "warning: made-up-7b/0: answers of 41 tokens, and 200 to 250" in output
    assert "mixtral-8x7b *" in output
    assert "error 5.0 % in the median, 5.0 % at most; 90 % intervals hold 1 of 1" in (
        output
    )
    # A table without measured values has predictions only.
    lines = (GOLDEN / "vllm_stages.csv").read_text().splitlines()
    cut = lines[0].split(",").index("successes")
    Path("new.csv").write_text(
        "".join(",".join(x.split(",")[:cut]) + "\n" for x in lines)
    )
    plain = document(simulate, "--stages", "new.csv", "--plot")
    assert plain["rows"][0]["e2e_s"]["error"] is None
    assert (Path(plain["out"]) / "figure-2.png").exists()
    assert "coverage" not in plain
