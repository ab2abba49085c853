"""Records are listed with their age and doubts, and made again in pieces."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxkv
from experiments.cli import record_list, remaking
from tests.support.commands import Command, assert_refused, document
from tests.support.folders import RECORDS, ROOT


def test_all_records_are_listed_with_age_and_doubt(jaxkv: Command) -> None:
    rows = document(jaxkv, "records")["records"]
    paths = RECORDS.glob("*/env.json")
    assert [row["name"] for row in rows] == sorted(path.parent.name for path in paths)
    for row in rows:
        assert row["seconds"] >= 0
        is_dirty = row["commit"].endswith("+")
        assert (row["unverified"] == "dirty tree") == is_dirty
        if row["commits_since"] is None and not is_dirty:
            assert row["unverified"] == "unknown commit"
    assert {row["name"] for row in rows if row["timed"]} >= {"bench_decode", "demo"}


@pytest.mark.parametrize(
    ("env", "is_timed", "age", "doubt"),
    [
        ({"commit": "a+"}, False, 3, "dirty tree"),
        ({"commit": "a"}, False, None, "unknown commit"),
        ({"commit": "a"}, False, 3, ""),
        ({"commit": "a"}, True, 3, "no yardstick"),
        ({"commit": "a", "yardstick_s": [0.021, 0.02]}, True, 3, ""),
        (
            {"commit": "a", "yardstick_s": [0.02, 0.025]},
            True,
            3,
            "yardstick 1.25 of its best",
        ),
    ],
)
def test_a_record_is_unverified_for_one_reason(
    env: dict[str, Any], is_timed: bool, age: int | None, doubt: str
) -> None:
    machine = {"cpu": "a processor", "num_cpus": 2}
    record = record_list.Record("name", machine | env, is_timed, age)
    assert record.doubt({("a processor", 2): 0.02}) == doubt


def test_results_are_compared_by_arrays_and_verdicts(tmp_path: Path) -> None:
    for name, loss, verdict in (("old", 1.0, "holds"), ("new", 2.0, "fails")):
        folder = tmp_path / name
        folder.mkdir()
        np.savez(
            folder / "result.npz", steps=[1, 2], loss=[1.0, loss], rate=[2.0, loss]
        )
        claims = [{"claim": "it falls", "verdict": verdict}]
        (folder / "claims.json").write_text(json.dumps(claims), "utf-8")
    folders = tmp_path / "old", tmp_path / "new"
    assert remaking._differing_arrays(*folders) == {"loss": 0.5, "rate": 0.5}
    assert remaking._differing_arrays(tmp_path / "old", tmp_path / "old") == {}
    assert remaking._changed_verdicts(*folders) == ["it falls: holds, now fails"]


def test_a_process_does_not_run_while_it_is_paused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys, time\nwhile True: print('x', flush=True); time.sleep(0.01)"
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=file, start_new_session=True
        )
    try:
        while not log.stat().st_size:
            pass
        process = remaking._Process(child.pid)
        process.pause()
        while remaking._process_state(child.pid) != "T":
            pass
        size = log.stat().st_size
        assert remaking._is_running(child.pid)
        process.continue_()
        while log.stat().st_size == size:
            pass
        assert process.paused_s > 0
    finally:
        child.kill()
        child.wait()
    assert not remaking._is_running(child.pid)


def test_unknown_records_and_commits_are_refused(jaxkv: Command) -> None:
    assert_refused(jaxkv, "records --make demi", "unknown record 'demi'")
    assert_refused(jaxkv, "records --since HEAD", "--since needs --make")
    assert_refused(
        jaxkv, "records --make all --since no_such", "--since no_such: is no commit"
    )
    assert_refused(jaxkv, "records --make demo --max-seconds 0", "must be above 0")


def test_the_artifact_page_has_the_verdicts_of_the_records() -> None:
    page = (ROOT / "experiments" / "ARTIFACT.md").read_text("utf-8")
    rows = re.findall(
        r"^\| \[(\w+)\].*`jaxkv (.*)` \| .* \| (.*) \|$", page, re.MULTILINE
    )
    assert len(rows) > 5
    for name, command, counts in rows:
        assert command == f"records --make {name}"
        claims = json.loads((RECORDS / name / "claims.json").read_text("utf-8"))
        verdicts = [claim["verdict"] for claim in claims]
        assert counts.split(", ") == [
            str(verdicts.count(x)) for x in ("holds", "fails", "differs")
        ]


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"version: {jaxkv.__version__}\n" in citation


@pytest.mark.slow
@pytest.mark.usefixtures("full_optimization")
def test_a_record_is_made_again_in_two_pieces(tmp_path: Path) -> None:
    """In a clone, whose commit is clean; the second call needs no work."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    shutil.rmtree(clone / "experiments" / "records" / "agents")  # a record may change

    def make(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jaxkv.cli.main", "records", *flags]
        return subprocess.run(command, cwd=clone, capture_output=True, text=True)

    first = make("--make", "mean_estimation", "--max-seconds", "2")
    assert first.returncode == 75, first.stderr
    assert "to do: mean_estimation" in first.stdout
    second = make("--make", "mean_estimation")
    assert second.returncode == 0, second.stderr
    assert "equal arrays" in second.stdout
    env = json.loads(
        (clone / "experiments/records/mean_estimation/env.json").read_text("utf-8")
    )
    assert not env["commit"].endswith("+")
    assert len(env["yardstick_s"]) == len(env["load_average"]) == 4
    assert env["earlier"]["differing_arrays"] == {}
    third = make("--make", "mean_estimation", "--since", env["commit"])
    assert third.returncode == 0
    assert "0 records" in third.stderr
