"""Latency against rate: crossings of a bound, loads, systems and replays."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.serving.latency_vs_rate import (
    azure,
    figures,
    policies,
    runs,
    settings,
)
from experiments.serving.latency_vs_rate.published import PANELS, beam_pool_factor
from jaxkv import clock
from jaxkv.plotting import render_figure
from jaxkv.report import read_run
from jaxkv.simulation import make_work
from jaxkv.workloads import (
    ALPACA,
    SHAREGPT,
    LatencyCurve,
    choose_rates,
    load_ratios,
    sustained_rate,
)
from tests.support import smoke
from tests.support.folders import RECORDS
from tests.support.mutation import replace

CURVE = LatencyCurve(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.05, 0.05, 0.5, 5.0]))


def test_a_bound_is_crossed_between_two_rates() -> None:
    at = sustained_rate
    assert at(CURVE, 0.5).rate == pytest.approx(3)
    assert at(CURVE, 0.05 * 10**0.5).rate == pytest.approx(2.5)
    assert at(CURVE, 0.01).text == "< 1"
    assert at(CURVE, 9.0).text == "> 4"
    twice = CURVE._replace(rates=2 * CURVE.rates)
    ratios = load_ratios(twice, CURVE, runs.LATENCY_RANGE)
    np.testing.assert_allclose(ratios, 2)
    assert ratios.shape == (9,)


def test_further_rates_are_near_the_crossings() -> None:
    between = choose_rates
    np.testing.assert_allclose(between(CURVE, runs.LATENCY_RANGE, 3), [2.5, 3, 3.5])
    high = LatencyCurve(CURVE.rates, np.full(4, 5.0))
    np.testing.assert_allclose(between(high, runs.LATENCY_RANGE, 3), [0.25, 0.5, 0.75])


def test_a_load_is_the_same_at_every_rate() -> None:
    load = runs.draw_load(ALPACA, 4.0, 100.0, seed=1)
    slow = load.at(2.0)
    fast = load.at(4.0)
    num = slow.prompt.shape[0]
    assert 150 < num < 250 < fast.prompt.shape[0]
    np.testing.assert_array_equal(slow.output, fast.output[:num])
    arrival_s = clock.to_seconds(np.asarray(slow.arrival))
    np.testing.assert_allclose(
        arrival_s, 2 * clock.to_seconds(np.asarray(fast.arrival[:num])), atol=3e-6
    )
    assert arrival_s[-1] < 100
    repeated_load = load.repeated(2.0, 3)
    np.testing.assert_array_equal(repeated_load.output, np.repeat(slow.output, 3))


def test_further_rates_are_near_or_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    requested_rates = []

    def serve(setting: Any, load: Any, rates: dict[str, Any], progress: Any) -> list:
        requested_rates.append(rates)
        # One system crosses the bounds from 2 to 3 requests/s, one never does.
        return [
            {"system": x, "rate_per_s": y, "normalised_s": 10 ** (2 * y - 5.5)}
            if x == "paged"
            else {"system": x, "rate_per_s": y, "normalised_s": 0.05}
            for x, ys in rates.items()
            for y in ys
        ]

    replace(monkeypatch, runs, "serve_at_rates", serve)
    setting = PANELS["12a"].setting()
    load = runs.draw_load(ALPACA, 1.0, 10.0, 0)
    even = np.array([1.0, 2.0, 3.0])
    systems = ("paged", "Orca (Max)")
    rate_rows = runs.explore_rates(
        setting, load, systems, even, num_near=2, max_rate=5.0
    )
    near = requested_rates[1]["paged"]
    beyond = requested_rates[1]["Orca (Max)"]
    assert near == pytest.approx([2 + 1 / 3, 2 + 2 / 3])
    assert beyond == [4.0, 5.0]
    assert (
        requested_rates[2] == {}
    )  # rates near the crossing are known, and the axis has ended
    assert {row["turn"] for row in rate_rows} == {0, 1}
    assert [x["relation"] for x in runs.sustained_rows(rate_rows)] == ["is", "at least"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return smoke.run("latency_vs_rate").result


@pytest.mark.slow
def test_systems_differ_under_high_load(rows: list[dict[str, Any]]) -> None:
    by_rate = {(x["system"], x["rate_per_s"]): x for x in rows}
    one = by_rate["paged", 1.0]
    two = by_rate["paged", 2.0]
    other = by_rate["Orca (Oracle)", 1.0]
    worse = by_rate["Orca (Oracle)", 2.0]
    assert all(row["answered_share"] == 1 for row in (one, two, other))
    # A single sequence takes a step per token.
    assert 0.031 < one["normalised_s"] <= other["normalised_s"] < 0.2
    assert worse["normalised_s"] > 1.5 * two["normalised_s"]
    assert worse["batch"] < two["batch"]
    max_rate = figures.MAX_RATE_RATIO * PANELS["12a"].axis
    # Little's law: without preemption, a request runs one step per token.
    w = runs.draw_load(SHAREGPT, max_rate, 72.0, 0).at(1.0)
    ran_s = np.asarray(w.output).sum() * one["step_s"]
    assert one["num_preempted"] == 0
    assert one["batch"] * one["busy_s"] == pytest.approx(ran_s, rel=0.1)


@pytest.mark.slow
def test_it_is_drawn_and_judged(rows: list[dict[str, Any]]) -> None:
    study = figures.STUDY
    claims = study.claims(rows)
    assert any("served at once by the paged system" in claim.claim for claim in claims)
    assert [getattr(x, "title", "") for x in study.report_parts(rows)] == [
        "requests/s at 0.5 s a token",
        "at the end of the published axis",
        "time to simulate, compilation included",
    ]
    files = render_figure(
        lambda axes: study.plot(axes, rows),
        panels=study.panels[:2],
        size_inches=(2.0, 2.0),
    )
    # Absent panels leave no gap: one curve next to the batches.
    assert int.from_bytes(files["figure.png"][20:24]) == 400


@pytest.mark.slow
@pytest.mark.usefixtures("full_optimization")
def test_an_hour_at_eight_rates_is_simulated_in_less_than_90_s_on_two_cores() -> None:
    config = dataclasses.replace(
        figures.CONFIGS["figure_12a"],
        num_near=0,
        systems=settings.SYSTEMS[1:],
    )
    rate_rows = figures.run(config)
    assert len(rate_rows) == 4 * 8
    assert rate_rows[0]["processor_s"] < 90  # on one; compilation is in it
    ours = {x["system"]: x["batch"] for x in rate_rows if x["rate_per_s"] == 2.0}
    assert ours["Orca (Max)"] == pytest.approx(7, rel=0.01)
    assert ours["paged"] > 2 * ours["Orca (Oracle)"]


def test_beams_share_more_than_samples() -> None:
    measured = read_run(RECORDS / "sharing", load_experiment("sharing")).result
    samples, beams = (x.saved("short", 4) for x in (measured.samples, measured.beams))
    assert 0 < samples < beams < 3 / 4
    assert beam_pool_factor(4) == pytest.approx((1 - samples) / (1 - beams))
    assert PANELS["14e"].setting().pool_factor == beam_pool_factor(4)
    assert PANELS["14b"].setting().pool_factor == 1
    with pytest.raises(ValueError, match="no requests of 3"):
        beam_pool_factor(3)


RECORDING = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""


@pytest.mark.thorough
def test_all_requests_of_a_recording_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "azure_conv.csv").write_text(RECORDING)
    monkeypatch.setenv(azure.DATA_VARIABLE, str(tmp_path))
    monkeypatch.setattr(azure, "MAX_SLOTS", 4)
    monkeypatch.setattr(azure, "HEAD_SIZE", 2)
    config = dataclasses.replace(
        azure.CONFIGS["azure"], traces=("azure_conv",), num_devices=(1, 2)
    )
    rate_rows = azure.run(config)
    assert [row["num_answered"] for row in rate_rows] == [3] * 4
    assert [row["num_rejected"] for row in rate_rows] == [0] * 4
    # Each token reads 13.5 GB at 2,039 GB/s, or at twice that.
    steps = [row["each_p50_s"] for row in rate_rows]
    assert steps[0] == pytest.approx(13.48e9 / 2039e9, rel=0.05)
    assert steps[1] == pytest.approx(steps[0] / 2, rel=0.01)
    assert steps[2] == pytest.approx(steps[0] * 26.03 / 13.48, rel=0.05)
    assert azure.summary(rate_rows)
    assert azure.metrics(rate_rows) == {"capacities": [], "rows": rate_rows}


@pytest.mark.slow
def test_each_policy_improves_its_metric(tmp_path: Path) -> None:
    """Serves a burst of 600 requests; each policy is best at its metric, or equal."""
    rng = np.random.default_rng(0)
    num = 600
    columns = rng.uniform(0, 10, num), rng.integers(200, 1500, num)
    rows = zip(np.sort(columns[0]), columns[1], rng.integers(2, 400, num), strict=True)
    path = tmp_path / "burst.csv"
    lines = [f"{t:.6f},{prompt},{output}" for t, prompt, output in rows]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines))
    config = policies.Config(recording=path, rate_factor=1.0, num_devices=1)
    table = policies.run(config).policies
    assert table.policy.tolist() == [*policies.POLICIES]
    assert set(table.answered.tolist()) == {num}
    first, short, oracle, ageing, deadline, fair = range(6)
    assert table.wait_mean_s[short] < table.wait_mean_s[first]
    assert table.wait_mean_s[oracle] < table.wait_mean_s[first]
    assert table.urgent_p99_s[ageing] < table.urgent_p99_s[first]
    assert table.late_share[deadline] < table.late_share[first]
    assert table.light_mean_s[fair] < table.light_mean_s[first]
    # Attributes and predictions do not change first come first served.
    load = policies.draw_workload(config)
    other = policies.draw_workload(dataclasses.replace(config, seed=1))
    np.testing.assert_array_equal(load.arrival, other.arrival)
    assert load.attributes is not None
    assert other.attributes is not None
    assert not np.array_equal(load.attributes.session, other.attributes.session)


def test_missing_recordings_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(azure.DATA_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="JAXKV_DATA names no folder"):
        azure.find_recording("azure_conv")
    monkeypatch.setenv(azure.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match="there is no such file"):
        azure.find_recording("azure_conv")


def test_configs_of_the_time_before_separate_studies_are_read() -> None:
    old = {"panels": [], "traces": ["azure_conv"], "num_rates": 8, "seed": 0}
    experiment = load_experiment("latency_vs_rate")
    config = experiment.config_loads(json.dumps(old), "config.json")
    assert config == azure.Config(traces=("azure_conv",))
    old |= {"panels": ["12a"], "traces": []}
    config = experiment.config_loads(json.dumps(old), "config.json")
    assert config == figures.Config(panels=("12a",))


def test_the_calibrated_clock_is_faster_than_the_published_one() -> None:
    """A step of the paper's batch of 30; only figures with the old clock are judged."""
    step = make_work(num_decodes=30, decode_context=30 * 450, num_drawn=30)
    old, new = (
        float(settings.server_cost(settings.MACHINES[x])(step))
        for x in ("13B", settings.CALIBRATED)
    )
    # Both read 26 GB of weights at no more than 1.555 TB/s.
    assert 26 / 1555 < new < 0.75 * old
    assert "12a (calibrated)" not in figures.Config().panels
    rows = [{"panel": "12a (calibrated)", "system": "paged", "rate_per_s": 2.0}]
    assert figures.STUDY.claims(rows) == []
