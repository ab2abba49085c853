"""`jaxkv calibrate` of tables of servers: fits, predictions and errors."""

import csv
import json
from pathlib import Path

import pytest

from jaxkv.report import Sheet
from scaling.cli import (
    SERVER_TABLES,
    ServerTablesConfig,
    find_public_tables,
    predict_server_tables,
)
from tests.support import commands
from tests.support.folders import ROOT

GOLDEN_ROWS = ROOT / "tests" / "golden" / "aic_servers.csv"


def write_table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_rows() -> list[dict[str, str]]:
    with GOLDEN_ROWS.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def calibrate(capsys: pytest.CaptureFixture[str]) -> commands.Command:
    return commands.command(capsys, "calibrate")


def test_one_line_for_a_table_that_cannot_be_fitted(
    calibrate: commands.Command, tmp_path: Path
) -> None:
    rows = read_rows()[:2]
    for row in rows:
        row["system"] = "h300_sxm"
    path = str(write_table(tmp_path / "rows.csv", rows))
    commands.assert_refused(calibrate, path, "unknown device 'h300_sxm'")
    rows = [row | {"system": "h100_sxm", "silicon_tpot_ms": ""} for row in rows]
    write_table(tmp_path / "rows.csv", rows)
    commands.assert_refused(calibrate, path, "no row has a time per token")
    commands.assert_refused(calibrate, f"{GOLDEN_ROWS} --leave-out load", "leave-out")


def test_the_public_tables_are_those_of_the_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAXKV_DATA", str(tmp_path))
    names = [path.name for path in find_public_tables(())]
    assert names == ["aic_servers.csv", "mlenergy_servers.csv"]
    monkeypatch.delenv("JAXKV_DATA")
    with pytest.raises(ValueError, match="needs JAXKV_DATA"):
        find_public_tables(())


@pytest.mark.thorough
def test_a_fit_predicts_another_table(
    calibrate: commands.Command, tmp_path: Path
) -> None:
    """A table without latencies is predicted equally, without errors."""
    rows = read_rows()
    is_qwen = [row["model_path"] == "Qwen/Qwen3-32B" for row in rows]
    qwen = [row for row, chosen in zip(rows, is_qwen, strict=True) if chosen]
    rest = [row for row, chosen in zip(rows, is_qwen, strict=True) if not chosen]
    rest_path = str(write_table(tmp_path / "rest.csv", rest))
    qwen_path = str(write_table(tmp_path / "qwen.csv", qwen))
    out = tmp_path / "run"
    args = (rest_path, "--predict", qwen_path, "--leave-out", "none")
    document = commands.document(calibrate, *args, "--out", str(out))
    (errors,) = [
        row
        for row in document["errors"]
        if (row["left_out"], row["by"]) == ("table", "model")
        and row["quantity"] == "time per token"
    ]
    assert (errors["group"], errors["num_rows"]) == ("qwen3-32b", len(qwen))
    assert errors["median"] < 0.2
    assert document["num_fitted"] == len(rest) - 1
    predictions = json.loads((out / "prediction.json").read_text())
    assert {row["server"] for row in predictions} == {row["id"] for row in qwen}
    blank = [row | {"silicon_tpot_ms": "", "silicon_ttft_ms": ""} for row in qwen]
    blank_path = str(write_table(tmp_path / "blank.csv", blank))
    config = ServerTablesConfig(tables=(rest_path,), predict=(blank_path,))
    result = predict_server_tables(config)
    table = result.predictions.where(left_out="table", quantity="time per token")
    expected = [x for x in predictions if x["quantity"] == "time per token"]
    assert table.predicted.tolist() == pytest.approx([x["predicted"] for x in expected])
    assert not len(result.group_errors("table", "model"))
    assert SERVER_TABLES.summary is not None
    sheets = [x for x in SERVER_TABLES.summary(result) if isinstance(x, Sheet)]
    (sheet,) = (x for x in sheets if x.title == "predictions")
    first = expected[0]
    assert [row[0] for row in sheet.rows] == [row["id"] for row in qwen]
    assert sheet.rows[0][1].startswith(f"{first['predicted']:.3g} ({first['low']:.3g}")
    # The fit is a file that simulations read; the table is its own prediction.
    fit = tmp_path / "fit.json"
    status, output, _ = calibrate(rest_path, "--out", str(fit))
    assert status == 0
    assert "determined" in output
    again = json.loads((out / "server.json").read_text())
    assert json.loads(fit.read_text()) == again
    (next_row, *_) = document["next_rows"]
    assert next_row["token_width"] < 0.6
