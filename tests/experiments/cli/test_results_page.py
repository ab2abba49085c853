"""The page of claims says what the records say, and nothing else."""

import json
import re
import shutil
from pathlib import Path

import pytest

from experiments.cli import main, results_page


@pytest.mark.thorough
def test_the_page_that_ships_is_made_of_the_records_that_ship() -> None:
    page = results_page.page(results_page.find(results_page.RECORDS))
    assert results_page.PAGE.read_text("utf-8") == page


def test_the_reports_that_ship_show_figures_that_ship() -> None:
    reports = list(results_page.RECORDS.glob("*/report.md"))
    shown = [
        report.parent / name
        for report in reports
        for name in re.findall(r"!\[.*?\]\((.*?)\)", report.read_text("utf-8"))
    ]
    assert len(shown) >= len(reports) > 20
    assert [path for path in shown if not path.is_file()] == []


def test_every_claim_of_every_record_stands_on_it_with_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(results_page.RECORDS / "sharing", tmp_path / "a" / "run")
    file = tmp_path / "page.md"
    flags = ["--folder", str(tmp_path), "--write", str(file), "--json"]
    assert main.main(["claims", *flags]) == 0
    [record] = json.loads(capsys.readouterr().out)["records"]
    assert (record["experiment"], record["config"]) == ("sharing", "real")
    assert record["folder"] == "a/run"
    text = file.read_text("utf-8")
    for claim in record["claims"]:
        assert f"| **{claim['verdict']}** | {claim['claim']} | " in text
    assert text.count("\n| **") == len(record["claims"])
    assert [path.name for path in tmp_path.iterdir()] in (
        ["a", "page.md"],
        ["page.md", "a"],
    )


def test_a_folder_without_runs_and_a_broken_one_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["claims", "--folder", str(tmp_path)]) == 2
    assert "holds no run folder" in capsys.readouterr().err
    (tmp_path / "claims.json").write_text("[{}]")
    (tmp_path / "env.json").write_text("{}")
    assert main.main(["claims", "--folder", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
