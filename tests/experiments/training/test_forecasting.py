"""The study of forecasts: splits, shares, and the bias of parabolas."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.training.forecasting import experiment, ladder, replay, targets
from jaxkv.report import read_run
from scaling.frontiers import vertex_shift
from tests.support import smoke


def simulated() -> np.ndarray:
    return experiment.read_logs(experiment.CONFIGS["smoke"])[experiment.SIMULATED]


def test_held_out_runs_have_more_compute() -> None:
    runs = simulated()
    flops = runs[:, 0] * runs[:, 1]
    masks = experiment.hold_out(runs)
    assert len(masks) == 4
    for mask in masks.values():
        assert 0 < mask.sum() < len(runs)
        assert flops[mask].min() > flops[~mask].max()


@pytest.mark.thorough
def test_parabolas_have_the_bias_of_the_closed_form() -> None:
    rows = [
        row
        for row in experiment._parabola_rows()
        if row["drift"] == 0 and row["off centre"] == 0
    ]
    assert len(rows) == 9
    for row in rows:
        shift = vertex_shift(row["alpha"], row["beta"], row["half width"], 9)
        assert row["parabola: N*"] == pytest.approx(10**shift - 1, abs=1e-6)
        assert abs(row["projection: N*"]) < 1e-5
        assert abs(row["parabola: a"]) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("rule", replay.RULES)
def test_rules_stay_within_the_compute(rule: str) -> None:
    runs = simulated()
    mask = experiment.hold_out(runs)["upper 15 %"]
    pool = replay.make_replay_pool(runs, mask)
    assert (np.diff(pool.flops) > -1e-9 * pool.flops[1:]).all()
    rng = np.random.default_rng(0)
    made = np.arange(pool.flops.size) < replay.NUM_FIRST
    for budget in (pool.flops[0], 0.1 * pool.flops.sum()):
        after = replay._CHOOSE[rule](pool, made, budget, 32, rng)
        assert (after >= made).all()
        assert pool.flops[after & ~made].sum() <= budget
    everything = np.ones(pool.flops.size, bool)
    assert pool.error(replay.fit_selected(pool, everything)) < 0.02


@pytest.mark.slow
def test_a_smoke_run_has_all_parts() -> None:
    rows = smoke.run("forecasting").metrics["rows"]
    parts = [row["part"] for row in rows]
    assert parts.count("parabola") == 27
    assert parts.count("coverage") == 4
    assert parts.count("replay") == len(replay.RULES) * len(replay.SHARES)
    for row in rows:
        if row["part"] == "coverage":
            assert row["inside without forecasts"] <= row["inside"] <= row["held out"]


def test_the_shipped_targets_are_those_of_the_forecast() -> None:
    """Hashes chain protocol, runs, forecast and targets; a changed forecast differs."""
    records = Path(experiment.__file__).parents[2] / "records"
    forecasting = load_experiment("forecasting")
    made, judged = (
        read_run(records / name, forecasting).result
        for name in ("forecast_ladder", "forecast_targets")
    )
    protocol = ladder.read_protocol("protocol.toml")
    document = targets.check_chain(protocol, made)
    chain = json.loads(judged.chain)
    assert chain["protocol_sha256"] == protocol.sha256 == document["protocol_sha256"]
    assert chain["runs_sha256"] == document["runs_sha256"]
    assert chain["forecast_sha256"] == ladder.sha256(made.forecast)
    assert judged.forecast == made.forecast
    level = protocol.fields["level"]
    scores = targets.score_targets(document, judged.runs, level)
    np.testing.assert_allclose(scores.crps, judged.scores.crps, rtol=1e-12)
    with pytest.raises(ValueError, match="runs_sha256"):
        targets.check_chain(protocol, dataclasses.replace(made, runs=made.runs + " "))
