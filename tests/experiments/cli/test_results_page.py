"""The page of claims says what the records say, and nothing else."""

import re
import shutil
from pathlib import Path

import pytest

from experiments.cli import results_page
from tests.support.commands import Command, assert_refused, document


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
    jaxkv: Command,
) -> None:
    shutil.copytree(results_page.RECORDS / "sharing", "a/run")
    found = document(jaxkv, "claims", "--folder", ".", "--write", "page.md")
    [record] = found["records"]
    assert (record["experiment"], record["config"]) == ("sharing", "real")
    assert record["folder"] == "a/run"
    text = Path("page.md").read_text("utf-8")
    for claim in record["claims"]:
        apart = {"calibrated": ", calibrated", "checks": ", check"}
        verdict = f"**{claim['verdict']}**{apart.get(claim['kind'], '')}"
        assert f"| {verdict} | {claim['claim']} | " in text
    assert text.count("\n| **") == len(record["claims"])
    assert {path.name for path in Path().iterdir()} == {"a", "page.md"}


def test_a_folder_without_runs_and_a_broken_one_are_named(jaxkv: Command) -> None:
    assert_refused(jaxkv, "claims --folder .", "holds no run folder")
    Path("claims.json").write_text("[{}]")
    Path("env.json").write_text("{}")
    assert_refused(jaxkv, "claims --folder .", "not a run folder")
