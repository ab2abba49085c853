"""`jaxkv fit CURVES --law schedule`: files, JSON, figure, and rejected options."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from jaxkv.report import Sheet
from scaling.cli.curves import CurveFitConfig, curve_experiment
from scaling.cli.curves.study import CurveFits, fit_curve_file, metrics, summary
from scaling.laws import CURVE_LAWS, RateSchedule, curve_losses
from tests.support import figures, smoke
from tests.support.commands import Command, assert_refused, document

STEP = np.linspace(500, 10000, 40)
SHARE = (STEP - 500) / 9500
RATES = {
    "constant": np.full(40, 3e-4),
    "cosine": 3e-5 + 2.7e-4 * (1 + np.cos(np.pi * SHARE)) / 2,
    "wsd": 3e-4 * np.interp(SHARE, [0, 0.8, 1], [1, 1, 0.1]),
}
LAW = CURVE_LAWS["annealed-area"]
TRUTH = {"A": 0.5, "alpha": 0.5, "B": 400.0, "lambda": 0.999}
FLOORS = {25: 3.1, 100: 2.8}


def end_loss(size: int, name: str) -> float:
    c = TRUTH | {"L0": FLOORS[size]}
    return float(curve_losses(LAW, c, RateSchedule(STEP, RATES[name]))[-5:].mean())


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Curves of two sizes with 0.01 % noise, and schedules of one without losses."""
    folder = tmp_path_factory.mktemp("curves")
    rng = np.random.default_rng(0)
    head = "size,schedule,step,lr"
    rows = [head + ",loss"]
    bare = [head]
    for size, floor in FLOORS.items():
        for name, rate in RATES.items():
            c = TRUTH | {"L0": floor}
            losses = curve_losses(LAW, c, RateSchedule(STEP, rate))
            losses = losses * np.exp(rng.normal(0, 1e-4, 40))
            for step, lr, loss in zip(STEP, rate, losses, strict=True):
                row = f"{size},{name},{step:.1f},{lr:.8g}"
                if size == 100 and name == "wsd":
                    bare.append(row)
                else:
                    rows.append(f"{row},{loss:.6f}")
    for name, lines in (("curves", rows), ("schedules", bare)):
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder / "curves.csv", folder / "schedules.csv"


@pytest.fixture(scope="module")
def result(tables: tuple[Path, Path]) -> CurveFits:
    curves, schedules = tables
    config = CurveFitConfig(
        log=str(curves),
        law="annealed-area",
        predict=str(schedules),
        hold_out="size == 25 and schedule == 'cosine'",
    )
    return fit_curve_file(config)


@pytest.mark.slow
def test_curves_are_held_out_and_predicted(result: CurveFits) -> None:
    found = metrics(result)
    by_role = {curve["role"]: curve for curve in found["curves"]}
    assert [curve["role"] for curve in found["curves"]].count("fitted") == 4
    held = by_role["held out"]
    assert (held["size"], held["curve"]) == (25, "cosine")
    assert abs(held["errors"]["annealed-area"]) < 1e-3
    assert abs(held["errors"]["constant curve"]) > 2e-3
    predicted = by_role["predicted"]
    assert predicted["seen"] is None
    assert predicted["end_loss"] == pytest.approx(end_loss(100, "wsd"), rel=1e-3)
    assert predicted["low"] < predicted["end_loss"] < predicted["high"]
    best = found["best_schedule"]
    assert best["size"] == 100
    assert best["loss"] <= min(best["other_losses"].values()) + 1e-9
    assert found["errors"]["annealed-area"]["num_curves"] == 1
    by_title = {part.title: part for part in summary(result) if isinstance(part, Sheet)}
    assert len(by_title["curves"].rows) == 6
    assert by_title["schedules by annealed-area"].rows[0][0] == "best"
    assert [row[0] for row in by_title["annealed-area"].rows][::3] == ["25", "100"]


@pytest.mark.thorough
def test_the_figure_meets_the_rules(
    result: CurveFits, monkeypatch: pytest.MonkeyPatch
) -> None:
    (study,) = curve_experiment("").studies
    sheet = figures.draw_sheet(lambda: smoke.draw(study, result), monkeypatch)
    assert figures.faults(sheet) == []


@pytest.mark.thorough
def test_the_command_writes_predictions_and_the_best_schedule(
    jaxkv: Command, tables: tuple[Path, Path], tmp_path: Path
) -> None:
    curves, schedules = tables
    out = tmp_path / "out"
    args = ("--law", "annealed-area", "--predict", str(schedules), "--out", str(out))
    found = document(jaxkv, "fit", str(curves), *args)
    assert found["law"] == "annealed-area"
    assert found["fits"] == []
    with open(out / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    assert rows[0]["seen"] == ""
    ends = [float(row["loss"]) for row in rows[-5:]]
    assert np.mean(ends) == pytest.approx(found["curves"][-1]["end_loss"], abs=1e-4)
    assert float(rows[-1]["low"]) < ends[-1] < float(rows[-1]["high"])
    best = np.loadtxt(out / "schedule.csv", delimiter=",", skiprows=1)
    assert best[0, 0] == 500
    assert best[-1, 0] == 10000
    assert (np.diff(best[:, 1]) <= 0).all()
    assert json.loads((out / "fit.json").read_text())["curves"] == found["curves"]
    assert (out / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("--law schedule,kaplan", "no law of curves 'kaplan'"),
        ("--law multi-power --best-size 7", "best_size=7 must be one of 25, 100"),
        ("--law multi-power --hold-out size>0", "the rule leaves no curve to fit"),
        ("--law multi-power --where N<3", "--where"),
        ("--law multi-power --level 2", "level=2.0 must be in (0, 1)"),
    ],
)
def test_bad_options_are_refused(
    jaxkv: Command, tables: tuple[Path, Path], args: str, line: str
) -> None:
    assert_refused(jaxkv, f"fit {tables[0]} {args}", line)
