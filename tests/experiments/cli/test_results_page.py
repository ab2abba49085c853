"""The page of claims is generated from the records."""

import json
import re
import shutil
from pathlib import Path

import pytest

from experiments.cli import results_page
from experiments.framework import load_experiment
from jaxkv.report import Claim
from tests.support.commands import Command, assert_refused, document


@pytest.mark.thorough
def test_the_shipped_page_is_generated_from_the_shipped_records() -> None:
    page = results_page.render_page(results_page.find_records(results_page.RECORDS))
    assert results_page.RESULTS_PAGE.read_text("utf-8") == page


@pytest.mark.thorough
def test_each_command_names_a_config() -> None:
    """A shipped one, or else the file of the record."""
    page = results_page.RESULTS_PAGE.read_text("utf-8")
    commands = re.findall(r"\| `jaxkv run (\w+) ([^`]*)`", page)
    assert len(commands) > 50
    for name, config in commands:
        if path := config.partition("--config experiments/")[2]:
            assert (results_page.RECORDS.parent / path).is_file()
        else:
            assert config in load_experiment(name).configs


def test_shipped_reports_reference_existing_figures() -> None:
    reports = list(results_page.RECORDS.glob("*/report.md"))
    shown = [
        report.parent / name
        for report in reports
        for name in re.findall(r"!\[.*?\]\((.*?)\)", report.read_text("utf-8"))
    ]
    assert len(shown) >= len(reports) > 20
    assert [path for path in shown if not path.is_file()] == []


def test_the_page_lists_every_claim_with_its_verdict(
    jaxkv: Command,
) -> None:
    shutil.copytree(results_page.RECORDS / "sharing", "a/run")
    report = document(jaxkv, "claims", "--folder", ".", "--write", "page.md")
    [record] = report["records"]
    assert (record["experiment"], record["config"]) == ("sharing", "real")
    assert record["folder"] == "a/run"
    text = Path("page.md").read_text("utf-8")
    for claim in record["claims"]:
        assert text.count(f"| {claim['claim']} | ") == 1
    env = json.loads(Path("a/run/env.json").read_text("utf-8"))
    origin = f"| [a/run](records/a/run/report.md), {env['started_at'][:10]}"
    assert text.count(origin) == len(record["claims"])
    titles = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert titles[0] == "Published numbers that their formula or rule gives (1)"
    assert titles[-1] == "Records"
    assert "| `jaxkv run sharing real` |" in text
    assert {path.name for path in Path().iterdir()} == {"a", "page.md"}


def test_folders_without_valid_runs_are_rejected(jaxkv: Command) -> None:
    assert_refused(jaxkv, "claims --folder .", "holds no run folder")
    Path("claims.json").write_text("[{}]")
    Path("env.json").write_text("{}")
    assert_refused(jaxkv, "claims --folder .", "not a run folder")


def recorded() -> dict[str, list[Claim]]:
    """Returns the claims of every record by its folder."""
    paths = sorted(results_page.RECORDS.glob("*/claims.json"))
    rows = {x.parent.name: json.loads(x.read_text("utf-8")) for x in paths}
    return {name: [Claim(**row) for row in listed] for name, listed in rows.items()}


def test_the_first_line_counts_claims_by_kind(jaxkv: Command) -> None:
    claims = [claim for listed in recorded().values() for claim in listed]

    def count(verdict: str, *kinds: str) -> int:
        return sum(x.verdict == verdict and x.kind in kinds for x in claims)

    _, _, first, *rest = results_page.RESULTS_PAGE.read_text("utf-8").splitlines()
    titles = [line for line in rest if line.startswith("## ")]
    assert titles[0].startswith("## Published numbers that are not reproduced")
    output = {x: count(x, "reproduces") for x in ("holds", "fails")}
    differ = count("differs", "cannot compare")
    shown = f"{output['holds']} hold, {output['fails']} fail, {differ} cannot be comp"
    assert shown in first
    checks = f"): {count('holds', 'checks')} hold, {count('fails', 'checks')} fail"
    assert checks in first.partition("Own checks")[2]
    formulas = f"): {count('holds', 'recomputes')} hold, {count('fails', 'recomputes')}"
    assert formulas in first.partition("Recomputed")[2]
    fitted = sum(x.kind == "calibrated" for x in claims)
    assert f"Calibrated ({fitted})" in first
    shutil.copytree(results_page.RECORDS / "memory_waste", "runs/one")
    counts = document(jaxkv, "claims", "--folder", "runs")["counts"]
    assert counts["calibrated"] == {"holds": 4, "fails": 0, "differs": 0}
    status, out, _ = jaxkv("claims", "--folder", "runs")
    assert status == 0
    assert out.splitlines()[-1].startswith("Reproductions (12): 9 hold")


def test_failing_claims_have_a_cause() -> None:
    failing = [x for listed in recorded().values() for x in listed]
    failing = [x for x in failing if x.verdict == "fails"]
    assert len(failing) > 20
    assert [x.claim for x in failing if not x.cause] == []


def test_kinds_of_claims_match_their_sources() -> None:
    """A published number is not a check, and counts as reproduced only once."""
    judged = [x for listed in recorded().values() for x in listed]
    judged = [x for x in judged if x.kind not in ("checks", "cannot compare")]
    assert len(judged) == len({(x.claim, x.source) for x in judged})
    for folder, claims in recorded().items():
        assert len(claims) == len({x.claim for x in claims}), folder
        for x in claims:
            match = re.match(r"(our|own|the same|an earlier|the simulator)\b", x.source)
            assert x.kind == "checks" or match is None, x.claim
            assert "published: ours" not in x.note
            if x.kind == "cannot compare":
                assert x.verdict == "differs"
                assert x.note


def test_rows_used_in_a_fit_are_calibrated() -> None:
    fitted = {
        (folder, x.claim)
        for folder, claims in recorded().items()
        for x in claims
        if x.kind == "calibrated"
    }
    uses = ("token states", "reservation", "internal waste", "external waste and rest")
    served = "OPT-13B, ShareGPT, 2 requests/s: served at once by Orca (Max)"
    assert fitted == {
        *(("memory_waste", f"Orca (Max): {use}") for use in uses),
        ("latency_vs_rate", served),
        ("chatbot", "most prompts have all of 1,024 tokens"),
    }
