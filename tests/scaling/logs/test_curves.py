"""Tables of training curves: columns, roles, and one line for every bad file."""

import json
from pathlib import Path

import numpy as np
import pytest

from scaling.logs import CurveColumns, read_curves
from tests.support.refusals import refused

HEAD = "params_millions,schedule,step,lr,loss\n"


def write(folder: Path, rows: list[str], head: str = HEAD) -> Path:
    path = folder / "curves.csv"
    path.write_text(head + "\n".join(rows) + "\n")
    return path


def curve_rows(size: str, name: str, rates: list[float]) -> list[str]:
    return [
        f"{size},{name},{100 * (i + 1)},{rate},{4 - 0.1 * i}"
        for i, rate in enumerate(rates)
    ]


CONSTANT = curve_rows("25", "constant", [1e-3] * 6)
DECAY = curve_rows("25", "decay", [1e-3, 1e-3, 1e-3, 8e-4, 4e-4, 0.0])
FEW = curve_rows("25", "few", [1e-3] * 4)


def test_curves_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    log = read_curves(write(tmp_path, CONSTANT + DECAY), hold_out="schedule == 'decay'")
    assert [curve.label for curve in log.curves] == ["constant at 25", "decay at 25"]
    assert log.is_held_out == (False, True)
    assert [curve.is_annealed for curve in log.curves] == [False, True]
    np.testing.assert_array_equal(log.curves[1].schedule.step, np.arange(1, 7) * 100)
    assert log.curves[0].end_loss == pytest.approx(3.7)


def test_columns_are_searched_or_named(tmp_path: Path) -> None:
    rows = [
        {"iteration": 10 * i + 10, "learning_rate": 1e-3, "val_loss": 3.0, "b": 2.0}
        for i in range(5)
    ]
    path = tmp_path / "curves.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (curve,) = read_curves(path).curves
    assert (curve.size, curve.name, curve.end_loss) == (1.0, "curve", 3.0)
    (curve,) = read_curves(path, CurveColumns(loss="b", size="b")).curves
    assert (curve.size, curve.end_loss) == (2.0, 2.0)


def test_schedules_need_no_losses(tmp_path: Path) -> None:
    bare = [row.rpartition(",")[0] for row in CONSTANT]
    head = HEAD.replace(",loss", "")
    (curve,) = read_curves(write(tmp_path, bare, head), needs_loss=False).curves
    assert np.isnan(curve.loss).all()
    half = CONSTANT[:3] + [row + "," for row in bare[3:]]
    (curve,) = read_curves(write(tmp_path, half), needs_loss=False).curves
    assert np.isnan(curve.loss).tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([*CONSTANT[:2], "25,constant,300,x,3"], "lr='x' must be a finite number"),
        ([*CONSTANT[:2], "25,constant,300,,3"], "row 3 (line 4): lr is missing"),
        ([*CONSTANT[:2], "25,constant,300,1e-3,"], "row 3 (line 4): loss is missing"),
        ([*CONSTANT[:2], "25,constant,300,-1,3"], "lr=-1 must be in [0, inf)"),
        (["25,constant,9,0,3", *CONSTANT], "lr=0 must be in (0, inf)"),
        ([*CONSTANT[:2], "25,constant,300,1,0"], "loss=0 must be in (0, inf)"),
        (
            [*CONSTANT[:3], "25,constant,200,1e-3,3"],
            "step=200 must be in (300, inf): steps of a curve must ascend",
        ),
        (["0,constant,9,1,3", *CONSTANT], "params_millions=0 must be in (0, inf)"),
        (FEW, "row 1 (line 2): a curve of 4 rows must have at least 5"),
    ],
)
def test_bad_rows_are_refused_with_their_place(
    tmp_path: Path, rows: list[str], line: str
) -> None:
    with refused(line, "curves.csv"):
        read_curves(write(tmp_path, rows))


def test_bad_columns_and_rules_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, CONSTANT)
    with refused("no column 'eta' (--lr); there is params_millions, schedule"):
        read_curves(path, CurveColumns(lr="eta"))
    with refused("selects 2 of the 6 rows of constant at 25; it must select whole"):
        read_curves(path, hold_out="step <= 200")
    with refused("no column for lr; --lr names one of"):
        read_curves(write(tmp_path, CONSTANT, HEAD.replace("lr", "eta")))
