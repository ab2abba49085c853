"""Run folders: complete, read back, redrawn to the same bytes, never partial."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments.framework.claims import judge
from jaxkv import files, report
from jaxkv.report import Claim, Relation, run_folder
from jaxkv.report.study import Experiment
from tests.support.refusals import refused

FILES = {
    *("config.json", "env.json", "result.npz", "claims.json"),
    *("figure.svg", "figure.png", "figure.csv", "report.md"),
}


def make_run(
    folder: Path, experiment: Experiment, **changes: object
) -> run_folder.SavedRun:
    config = dataclasses.replace(experiment.configs["smoke"], **changes)
    run_folder.begin_run(folder, experiment, config)
    result = experiment.study_of(config).run(config)
    return run_folder.finish_run(folder, experiment, result, duration_s=1.5)


def test_a_run_folder_is_complete_and_reads_back(
    tmp_path: Path, experiment: Experiment
) -> None:
    written_run = make_run(tmp_path, experiment, name="a run", num_points=3)
    assert {path.name for path in tmp_path.iterdir()} == FILES

    run = run_folder.read_run(tmp_path, experiment)
    assert run.config == written_run.config
    assert run.config.limit == math.inf
    np.testing.assert_array_equal(run.result.done, [0, 1, 2])
    assert run.result.tail == (1.5, "µ|s")
    assert run.env["experiment"] == "made_up"
    assert run.env["duration_s"] == 1.5
    assert run.env["versions"].keys() >= {"python", "jax", "numpy"}
    assert run.env["devices"][0].startswith("cpu")
    (claim,) = json.loads((tmp_path / "claims.json").read_text())
    assert claim == {
        "claim": "the tail is short",
        "source": "us",
        "published": 3.0,
        "ours": 1.5,
        "unit": "s",
        "tolerance": 0.0,
        "verdict": "fails",
        "relation": "equal",
        "kind": "reproduces",
        "note": "",
    }
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Does a made-up experiment leave a whole folder?\n")
    assert "| label | µ\\|s |" in report
    assert '"num_points": 3' in report
    assert "* **fails**: the tail is short; ours 1.5 s, published 3 s (us)." in report


def test_a_smoke_run_marks_claims_as_not_judged(
    tmp_path: Path, experiment: Experiment
) -> None:
    def claims(result: object) -> list[Claim]:
        terms: dict[str, Any] = {"published": 3.0, "ours": 3.0, "unit": "s"}
        sized = judge("at size", source="us", needs_size=True, **terms)
        return [sized, judge("at any", source="us", kind="checks", **terms)]

    (study,) = experiment.studies
    experiment = experiment._replace(studies=(study._replace(claims=claims),))
    judged = ["holds", "holds"]
    unjudged = ["not judged", "holds"]
    smoke = experiment.configs["smoke"]
    paper = experiment.configs["paper"]
    changed = dataclasses.replace(smoke, num_points=7)
    for config, name, expected in (
        (smoke, "", unjudged),
        (changed, "smoke", unjudged),
        (changed, "", judged),
        (paper, "paper", judged),
    ):
        folder = tmp_path / f"{config.num_points}{name}"
        run_folder.begin_run(folder, experiment, config, name)
        result = experiment.studies[0].run(config)
        run = run_folder.finish_run(folder, experiment, result, duration_s=1.0)
        assert [claim.verdict for claim in run.claims] == expected
        text = (folder / "report.md").read_text()
        assert ("1 not judged: smoke" in text) == (expected == unjudged)


def test_a_new_run_replaces_all_files_of_the_old_one(
    tmp_path: Path, experiment: Experiment
) -> None:
    make_run(tmp_path, experiment)
    run_folder.begin_run(tmp_path, experiment, experiment.configs["paper"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "env.json", run_folder.EARLIER}
    assert json.loads((tmp_path / "env.json").read_text())["status"] == "running"
    result = experiment.studies[0].run(experiment.configs["paper"])
    run_folder.finish_run(tmp_path, experiment, result, duration_s=1.0)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert run_folder.read_run(tmp_path, experiment).env["status"] == "done"


def test_an_abandoned_run_restores_the_old_one(
    tmp_path: Path, experiment: Experiment
) -> None:
    make_run(tmp_path, experiment)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run_folder.begin_run(tmp_path, experiment, experiment.configs["paper"])
    # The run is killed; the next one restores the earlier files.
    run_folder.begin_run(tmp_path, experiment, experiment.configs["paper"])
    run_folder.abandon_run(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    new = tmp_path / "new"
    run_folder.begin_run(new, experiment, experiment.configs["paper"])
    run_folder.abandon_run(new)
    assert not new.exists()


def test_rows_are_kept_as_json_lines(tmp_path: Path, experiment: Experiment) -> None:
    study = experiment.studies[0]._replace(
        result=list[dict],
        plot=lambda ax, result: ax.plot([row["loss"] or 0 for row in result]),
        claims=lambda result: [],
        metrics=lambda result: {"rows": result},
        summary=lambda result: [],
    )
    rows = experiment._replace(studies=(study,))
    run_folder.begin_run(tmp_path, rows, rows.configs["smoke"])
    result = [{"loss": np.float32(0.5)}, {"loss": math.nan}]
    run = run_folder.finish_run(tmp_path, rows, result, duration_s=0.0)
    assert (tmp_path / "runs.jsonl").read_text() == '{"loss": 0.5}\n{"loss": null}\n'
    assert run.result == [{"loss": 0.5}, {"loss": None}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "not JSON"),
        ("config.json", b'{"num_point": 3}', "did you mean num_points?"),
        ("config.json", b'{"num_points": 1.5}', "1.5 is not of type int"),
        ("config.json", b'{"load": {"rate": -1}}', "self.rate=-1.0 must be above 0"),
        (
            "config.json",
            b'{"load": {"kind": "calm"}}',
            "'calm' is not one of: steady, bursty",
        ),
        ("env.json", b"[]", "holds list"),
        ("result.npz", b"PK not a zip", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, experiment: Experiment, name: str, content: bytes, message: str
) -> None:
    make_run(tmp_path, experiment)
    (tmp_path / name).write_bytes(content)
    with refused(message, name):
        run_folder.read_run(tmp_path, experiment)


def test_a_result_is_never_pickled(tmp_path: Path, experiment: Experiment) -> None:
    class Odd(NamedTuple):
        thing: object

    run_folder.begin_run(tmp_path, experiment, experiment.configs["smoke"])
    with pytest.raises(TypeError, match="field thing has dtype object"):
        run_folder.finish_run(tmp_path, experiment, Odd({}), duration_s=0.0)


def test_a_missing_array_is_named(tmp_path: Path, experiment: Experiment) -> None:
    make_run(tmp_path, experiment)
    np.savez(tmp_path / "result.npz", time_s=np.zeros(1), done=np.zeros(1))
    with pytest.raises(ValueError, match=r"result\.npz: lacks tail\.p95_s"):
        run_folder.read_run(tmp_path, experiment)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    files.write_atomically(path, "old")
    with pytest.raises(ValueError, match=r"config.json: cannot be written: 'utf-8'"):
        files.write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path: Path) -> None:
    assert (
        run_folder.new_folder(tmp_path / "a" / "b", "made_up") == tmp_path / "a" / "b"
    )
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that are not a run"):
        run_folder.new_folder(tmp_path, "made_up")
    with pytest.raises(ValueError, match="is a file"):
        run_folder.new_folder(tmp_path / "notes.txt", "made_up")


def test_default_folders_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [run_folder.new_folder(None, "made_up")]
    for _ in range(2):
        folders.append(run_folder.new_folder(None, "made_up"))
    assert len({*folders}) == 3


@pytest.mark.parametrize(
    ("relation", "ours", "verdict"),
    [
        ("equal", 9.5, "holds"),
        ("equal", 10.6, "fails"),
        ("at_least", 99.0, "holds"),
        ("at_least", 9.4, "fails"),
        ("at_most", -99.0, "holds"),
        ("at_most", 10.6, "fails"),
        ("at_most", -math.inf, "fails"),
        ("equal", math.nan, "fails"),
    ],
)
def test_a_verdict_follows_from_the_numbers(
    relation: Relation, ours: float, verdict: str
) -> None:
    claim = judge(
        "c",
        source="s",
        published=10.0,
        ours=ours,
        unit="s",
        tolerance=0.5,
        relation=relation,
        kind="checks",
    )
    assert (claim.verdict, claim.note, claim.kind) == (verdict, "", "checks")


def test_documents_are_strict_json() -> None:
    value = {"a": np.float32(1.5), "b": [math.inf, np.arange(2)], "c": Path("x")}
    assert json.loads(report.dumps(value)) == {
        "a": 1.5,
        "b": [None, [0, 1]],
        "c": "x",
    }
    with pytest.raises(TypeError, match="cannot be written"):
        report.dumps(object())
