"""Predictions of left-out stages: what each fit sees, and the record."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.framework import load_experiment
from jaxkv.report import read_run
from scaling.calibration import (
    PRIOR,
    PUBLISHED_SERVERS,
    LatencySummary,
    MeasuredStage,
    ServerPosterior,
    StageLatencies,
    load_posterior,
)
from scaling.cli.calibrate import study
from scaling.cli.calibrate.result import (
    END_TO_END,
    FIRST_TOKEN,
    LATENCY_STATISTICS,
    CalibrationResult,
)
from scaling.cli.calibrate.study import CalibrationConfig, predict_stages
from tests.support.commands import Command, assert_refused, document
from tests.support.folders import GOLDEN, RECORDS
from tests.support.impatience import Stopping

NUM_DRAWS = 8


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two models with two loads each, and an overloaded stage."""
    with (GOLDEN / "vllm_stages.csv").open() as file:
        first, overloaded = csv.DictReader(file)
    second = first | {"stage": "1", "rate_per_s": "9"}
    other = {"run": "b", "model": "codellama/CodeLlama-34b-hf", "e2e_s_mean": "0.7"}
    rows = [first, second, first | other, second | other, overloaded]
    path = tmp_path / "stages.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, first)
        writer.writeheader()
        writer.writerows(rows)
    return path


class Fakes:
    """A fit that sees nothing but names, and a prediction of 1 s and its neighbours."""

    def __init__(self) -> None:
        self.fitted: list[tuple[str, ...]] = []
        self.predicted: list[tuple[str, tuple[str, ...]]] = []

    def fit(
        self, stages: Sequence[MeasuredStage], *, on_simulated: Any, **_: Any
    ) -> ServerPosterior:
        on_simulated()
        names = tuple(stage.name for stage in stages)
        self.fitted.append(names)
        draws = np.zeros((NUM_DRAWS, len(PRIOR)))
        return ServerPosterior(
            draws, {}, {}, names, draws[0], np.zeros((len(names), 2)), 100.0, ("h100",)
        )

    def predict(
        self, stage: MeasuredStage, posterior: ServerPosterior, **_: Any
    ) -> StageLatencies:
        assert stage.end_to_end_s is stage.first_token_s is stage.inter_token_s is None
        self.predicted.append((stage.name, posterior.stages))
        values = LatencySummary(*(np.linspace(0.8, 1.2, NUM_DRAWS),) * 3)
        return StageLatencies(values, values, values)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fake_fits = Fakes()
    monkeypatch.setattr(study, "fit_posterior", fake_fits.fit)
    monkeypatch.setattr(study, "predict_stage", fake_fits.predict)
    return fake_fits


def test_no_fit_sees_the_stages_that_it_predicts(fakes: Fakes, table: Path) -> None:
    result = predict_stages(
        CalibrationConfig(runs=str(table), leave_out=("model", "load"))
    )
    assert fakes.fitted[:2] == [("b/0", "b/1"), ("made-up-7b/0", "made-up-7b/1")]
    assert len(fakes.fitted) == 6
    assert all(stage not in fitted for stage, fitted in fakes.predicted)
    assert_disjoint(result)
    assert result.fits.name.tolist()[:3] == [
        "llama-2-7b",
        "codellama-34b",
        "made-up-7b/0",
    ]
    assert result.server == ""
    assert result.overloaded.rows() == [
        {"stage": "made-up-8x7b/1", "rate_per_s": 2.5, "successes": 140, "failures": 10}
    ]


def assert_disjoint(result: CalibrationResult) -> None:
    """Asserts that each left-out prediction follows from a fit without its stage."""
    stages = {*result.predictions.stage.tolist()}
    for kind in ("model", "load"):
        predictions = result.predictions.where(left_out=kind)
        assert {*predictions.stage.tolist()} == stages
        assert len(predictions) == len(LATENCY_STATISTICS) * len(stages)
        for fit in predictions.distinct("fit"):
            predicted = {*predictions.where(fit=fit).stage.tolist()}
            fitted = {*result.fits.stages[fit].split()}
            assert result.fits.left_out[fit] == kind
            assert fitted | predicted == stages
            assert not fitted & predicted
            if kind == "model":
                models = {
                    name: [
                        *predictions.where(fit=fit).distinct("model"),
                    ]
                    for name in predicted
                }
                assert len({*map(tuple, models.values())}) == 1


def test_a_fit_of_all_stages_keeps_its_coefficients(fakes: Fakes, table: Path) -> None:
    result = predict_stages(CalibrationConfig(runs=str(table)))
    assert fakes.fitted == [("made-up-7b/0", "made-up-7b/1", "b/0", "b/1")]
    assert list(study.files(result)) == ["server.json"]
    assert result.coefficients.name.tolist() == list(PRIOR)
    row = result.coefficients.where(name="weight_share")
    assert row.prior_low < row.prior < row.prior_high
    assert row.low == row.median == pytest.approx(row.prior)


def test_errors_and_intervals_of_predictions(fakes: Fakes, table: Path) -> None:
    errors = predict_stages(CalibrationConfig(runs=str(table))).errors("none")
    end_to_end = errors.where(latency=END_TO_END)
    # Measured 0.5 s and 0.7 s, predicted 1 s with a 90 % interval of 0.36.
    assert end_to_end.median == pytest.approx(np.mean([1.0, 3 / 7]))
    assert end_to_end.worst == pytest.approx(1.0)
    assert (end_to_end.in_50, end_to_end.in_90, end_to_end.stages) == (0, 0, 4)
    assert end_to_end.width == pytest.approx(0.36)
    assert errors.where(latency=FIRST_TOKEN).worst == pytest.approx(1 / 0.019 - 1)


def test_a_stopped_run_keeps_finished_fits(fakes: Fakes, table: Path) -> None:
    config = CalibrationConfig(runs=str(table), leave_out=("model",))
    result = predict_stages(config, Stopping(after=4))
    assert len(result.fits) == 1
    with pytest.raises(KeyboardInterrupt, match="before the first fit"):
        predict_stages(config, Stopping(after=1))


def test_tables_that_cannot_be_fitted(table: Path, jaxkv: Command) -> None:
    lines = table.read_text().splitlines()
    left_out = f"calibrate {table} --leave-out model"
    line = "--out a.json: leave_out=('model',) writes no coefficients"
    assert_refused(jaxkv, f"{left_out} --out a.json", line)
    table.write_text("\n".join([lines[0], *lines[1:3]]))
    line = "2 of 2 stages are not overloaded, too few for leave_out=('model',)"
    assert_refused(jaxkv, left_out, line)
    table.write_text("\n".join([lines[0], lines[5]]))
    assert_refused(jaxkv, f"calibrate {table}", "0 of 1 stages are not overloaded")
    table.write_text("run,stage\na,0\n")
    assert_refused(jaxkv, f"calibrate {table}", "lacks the columns model")
    assert_refused(jaxkv, "calibrate", "RUNS is missing: a CSV")
    assert_refused(jaxkv, "calibrate no.csv", "no.csv")


@pytest.mark.thorough
def test_coefficients_are_written_to_a_named_file(
    fakes: Fakes, table: Path, jaxkv: Command, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    report = document(jaxkv, "calibrate", str(table), "--out", str(file))
    assert load_posterior(file).stages[:1] == ("made-up-7b/0",)
    assert (Path(report["out"]) / "server.json").read_bytes() == file.read_bytes()
    assert report["errors"][0]["latency"] == END_TO_END
    assert len(report["overloaded"]) == 1


def record() -> CalibrationResult:
    return read_run(RECORDS / "calibration", load_experiment("calibration")).result


def test_recorded_predictions_are_of_fits_that_never_saw_their_stages() -> None:
    result = record()
    assert result.kinds() == ["model", "load", "none", "roofline"]
    assert len({*result.predictions.stage.tolist()}) == 15
    assert len(result.overloaded) == 3
    assert_disjoint(result)


def test_the_published_servers_are_those_of_the_record() -> None:
    assert record().server == PUBLISHED_SERVERS.read_text()
    assert len(load_posterior().stages) == 15
