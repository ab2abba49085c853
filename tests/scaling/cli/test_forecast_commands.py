"""`jaxkv fit` with `--law downstream` and `--law hyperparameters`: files, figures."""

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from jaxkv.report import Sheet
from scaling.cli.forecasts import (
    DownstreamConfig,
    HyperparameterConfig,
    downstream,
    downstream_experiment,
    hyperparameter_experiment,
    hyperparameters,
)
from scaling.cli.forecasts.downstream import ForecastFits, fit_task_file
from scaling.cli.forecasts.hyperparameters import fit_tuned_file
from tests.support import figures, smoke
from tests.support.commands import Command, assert_refused, document

TASKS = ("quiz=bpb,acc,0.25", "maze=bits,score,0.5")


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    rows = ["run,bpb,acc,bits,score"]
    for size, multiple in itertools.product((200, 400, 800, 1600), (0.5, 1, 5, 10)):
        n = size * 1e6
        cells = [f"{size}M-{multiple}xC"]
        for shift, chance in ((0.0, 0.25), (0.2, 0.5)):
            d = 20 * n * multiple
            loss = shift + 0.5 + 40 * n**-0.25 + 90 * d**-0.25
            rise = 1 / (1 + np.exp(6 * (loss - shift - 0.8)))
            accuracy = chance + (1 - chance) * rise
            cells += [f"{x * np.exp(0.01 * rng.normal())}" for x in (loss, accuracy)]
        rows.append(",".join(cells))
    path = tmp_path_factory.mktemp("ladder") / "ladder.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    rows = ["N,D,lr,bs,loss"]
    for n, multiple in itertools.product((2e8, 4e8, 8e8), (20, 50, 100)):
        d = n * multiple
        grid = itertools.product(np.geomspace(1e-4, 2e-2, 16), 2.0 ** np.arange(4, 12))
        for rate, batch in grid:
            u = np.log(rate / (2 * n**-0.6 * d**0.25))
            v = np.log(batch / (3e-4 * n**-0.1 * d**0.6))
            excess = (0.09 * u - 0.03 * v) ** 2 + (0.07 * v) ** 2
            loss = (1.7 + 400 / n**0.34 + 400 / d**0.28) * np.exp(
                excess + 5e-4 * rng.normal()
            )
            rows.append(f"{n},{d},{rate},{batch},{loss}")
    path = tmp_path_factory.mktemp("tuned") / "tuned.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def task_fits(ladder: Path) -> ForecastFits:
    config = DownstreamConfig(
        log=str(ladder), tasks=TASKS, hold_out="N > 1e9", predict=("7B:4T", str(ladder))
    )
    return fit_task_file(config)


@pytest.fixture(scope="module")
def rate_fits(tuned: Path) -> ForecastFits:
    config = HyperparameterConfig(
        log=str(tuned),
        hold_out="N > 4e8 and D > 4e10",
        predict=("400M:8B", "2B:100B"),
        batch_tokens=1024.0,
    )
    return fit_tuned_file(config)


def test_held_out_runs_are_scored_and_sizes_predicted(task_fits: ForecastFits) -> None:
    metrics = downstream.metrics(task_fits)
    rows = metrics["predictions"]
    roles = [row["role"] for row in rows]
    assert roles == ["held out"] * 8 + ["predicted"] * 34
    held_out = rows[:8]
    for row in held_out:
        error = row["accuracy"] / row["measured_accuracy"] - 1
        assert row["error"] == pytest.approx(error)
        is_covered = row["low"] <= row["measured_accuracy"] <= row["high"]
        assert row["is_covered"] is is_covered
    (largest, _) = (row for row in rows if row["run"] == "7B:4T")
    assert largest["measured_accuracy"] is None
    assert largest["error"] is None
    assert largest["low"] < largest["accuracy"] < largest["high"]
    # All 8 held-out and 32 tabled accuracies are scored.
    assert metrics["scores"]["all runs"]["num_scored"] == 40
    assert metrics["scores"]["1600M-1xC"]["num_scored"] == 4
    titles = [x.title for x in downstream.summary(task_fits) if isinstance(x, Sheet)]
    assert titles[:3] == ["downstream", "rehearsals", "errors"]
    # Tables of the last four runs, here of the file; all rows are in predictions.csv.
    assert titles[3:-1] == [f"1600M-{x}xC, predicted" for x in (0.5, 1, 5, 10)]


def test_an_infinite_interval_is_unknown(rate_fits: ForecastFits) -> None:
    document = json.loads(rate_fits.document)
    (*_, last) = document["predictions"]
    last |= {"rate_low": 0.0, "rate_high": None, "batch_low": 0.0, "batch_high": None}
    sheets = hyperparameters.summary(ForecastFits(document=json.dumps(document)))
    (pairs,) = (x for x in sheets if isinstance(x, Sheet) and x.title == "best pairs")
    assert [row[2] for row in pairs.rows].count("unknown") == 1
    assert pairs.rows[-1][4] == "unknown"


def test_cells_are_scored_beside_baselines(rate_fits: ForecastFits) -> None:
    metrics = hyperparameters.metrics(rate_fits)
    held_out, fitted, new = metrics["predictions"]
    assert [x["role"] for x in (held_out, fitted, new)] == [
        "held out",
        "fitted",
        "predicted",
    ]
    assert new["measured"] is None
    rate = 2 * 2e9**-0.6 * 1e11**0.25
    assert new["rate"] == pytest.approx(rate, rel=0.05)
    assert new["rate_low"] < rate < new["rate_high"]
    assert new["loss_low"] < new["loss"] < new["loss_high"]
    floor = 1.7 + 400 / 2e9**0.34 + 400 / 1e11**0.28
    assert new["loss"] == pytest.approx(floor, rel=5e-3)
    assert new["pairs"]["Step Law"]["batch"] == pytest.approx(0.58 * 1e11**0.571 / 1024)
    assert new["lost_by_miss"]["rate x 2"] == pytest.approx(
        np.expm1((0.09 * np.log(2)) ** 2), rel=0.1
    )
    assert held_out["measured"]["nearest"]["surface"]["lost"] < 2e-3
    scores = metrics["scores"]
    assert {x["num_cells"] for x in scores.values()} == {1}
    assert scores["surface"]["mean_lost"] <= scores["mean pair"]["mean_lost"]
    titles = [
        x.title for x in hyperparameters.summary(rate_fits) if isinstance(x, Sheet)
    ]
    assert titles == [
        "hyperparameters",
        "best pairs",
        "measured pairs",
        "loss lost by a miss",
        "loss lost in cells not fitted",
        "warnings",
    ]


@pytest.mark.thorough
def test_the_figures_meet_the_rules(
    task_fits: ForecastFits, rate_fits: ForecastFits, monkeypatch: pytest.MonkeyPatch
) -> None:
    for experiment, result in (
        (downstream_experiment(""), task_fits),
        (hyperparameter_experiment(""), rate_fits),
    ):
        (study,) = experiment.studies
        sheet = figures.draw_sheet(
            lambda s=study, r=result: smoke.draw(s, r), monkeypatch
        )
        assert figures.faults(sheet) == []


@pytest.mark.thorough
def test_the_commands_write_tables_and_documents(
    jaxkv: Command, ladder: Path, tuned: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tasks"
    args = ("--law", "downstream", "--predict", "7B:4T", "13B:5T", "--out", str(out))
    metrics = document(jaxkv, "fit", str(ladder), "--tasks", *TASKS, *args)
    with open(out / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["7B:4T", "7B:4T", "13B:5T", "13B:5T"]
    accuracy = metrics["predictions"][0]["accuracy"]
    assert float(rows[0]["accuracy"]) == pytest.approx(accuracy)
    out = tmp_path / "rates"
    args = ("--law", "hyperparameters", "--predict", "2B:100B", "--out", str(out))
    metrics = document(jaxkv, "fit", str(tuned), *args)
    with open(out / "predictions.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["rate"]) == pytest.approx(metrics["predictions"][0]["rate"])
    assert (out / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("law", "args", "line"),
    [
        ("downstream", "--predict 7B", "7B"),
        ("downstream", "--predict 7B:", "'7B:' must be PARAMETERS:TOKENS"),
        ("downstream", "--tasks arc", "no task 'arc'"),
        ("downstream", "--hold-out N>0", "a fit of tasks needs at least 6 runs"),
        ("downstream", "--level 2", "level=2.0 must be in (0, 1)"),
        ("hyperparameters", "--batch bps", "no column 'bps'"),
        ("hyperparameters", "--hold-out D>0", "a fit needs 4, of several N"),
        ("hyperparameters", "--hold-out lr>0.01", "it must select whole cells"),
        ("hyperparameters", "--where N<3", "--where"),
    ],
)
def test_bad_options_are_refused(
    jaxkv: Command, ladder: Path, tuned: Path, law: str, args: str, line: str
) -> None:
    log = ladder if law == "downstream" else tuned
    tasks = "" if "--tasks" in args or log == tuned else "--tasks " + " ".join(TASKS)
    assert_refused(jaxkv, f"fit {log} --law {law} {args} {tasks}", line)
