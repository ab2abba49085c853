"""The course: references pass, wrong solutions fail with a lesson, commands run."""

import itertools
import json
import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from experiments import framework
from experiments.course import assignments, command, grading
from jaxkv.cli import arguments, parsing
from jaxkv.cli.main import COMMANDS
from jaxkv.cli.main import main as run_command
from tests.support import commands
from tests.support.folders import ROOT

WITH_JAX = "batching_policy"
TESTS = {
    name: [
        x for h in (False, True) for x in assignments.make_tests(name, 0, is_hidden=h)
    ]
    for name in assignments.ASSIGNMENTS
    if name != WITH_JAX
}

PATH = Path(__file__).with_name("mistakes.toml")
MISTAKES = {
    mistake: (name, *entry)
    for name, table in tomllib.loads(PATH.read_text(encoding="utf-8")).items()
    for mistake, entry in table.items()
}


def grade_text(tmp_path: Path, name: str, text: str, tests=None, **options) -> dict:
    solution = tmp_path / "solution.py"
    solution.write_text(text, encoding="utf-8")
    checks = assignments.HOME / name / "checks.py"
    return grading.grade(solution, checks, tests or TESTS[name], **options)


def mutate(mistake: str) -> str:
    name, old, new, *_ = MISTAKES[mistake]
    text = (assignments.HOME / name / "reference.py").read_text(encoding="utf-8")
    assert text.count(old) == 1, mistake
    return text.replace(old, new)


def assert_teaches(results: dict, mistake: str) -> None:
    *_, title, words = MISTAKES[mistake]
    [row] = [x for x in results["tests"] if x["name"] == title]
    assert row["status"] == "failed"
    assert row["score"] == 0.0
    assert words in row["output"]


@pytest.mark.parametrize("name", TESTS)
def test_the_reference_has_full_score(name: str, tmp_path: Path) -> None:
    text = (assignments.HOME / name / "reference.py").read_text(encoding="utf-8")
    results = grade_text(tmp_path, name, text)
    assert [x["name"] for x in results["tests"] if x["status"] != "passed"] == []
    assert results["score"] == results["max_score"] == 100


@pytest.mark.parametrize("mistake", [x for x in MISTAKES if MISTAKES[x][0] != WITH_JAX])
def test_a_wrong_solution_fails_with_a_lesson(mistake: str, tmp_path: Path) -> None:
    name, *_, title, _ = MISTAKES[mistake]
    tests = [x for x in TESTS[name] if x.name == title]
    results = grade_text(tmp_path, name, mutate(mistake), tests)
    assert_teaches(results, mistake)


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", [x for x in MISTAKES if MISTAKES[x][0] == WITH_JAX])
def test_a_wrong_policy_fails_with_a_lesson(mistake: str, tmp_path: Path) -> None:
    public = assignments.make_tests(WITH_JAX, 0, is_hidden=False)
    tests = [*itertools.islice(public, 4)]  # without the load, which is simulated
    results = grade_text(tmp_path, WITH_JAX, mutate(mistake), tests, limit_s=120.0)
    assert_teaches(results, mistake)


@pytest.mark.slow
def test_the_reference_policy_has_full_score() -> None:
    reference = assignments.HOME / WITH_JAX / "reference.py"
    [results] = assignments.grade_solutions(WITH_JAX, [reference])
    assert results["score"] == results["max_score"] == 100, results["tests"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def count(*x):\n    while True: pass", "an endless loop?"),
        ("def count(*x): exit(0)", "raised SystemExit: 0"),
        ("def count(*x): os._exit(3)", "(exit status 3)"),
        ("def count(*x):\n    return 1 / 0", "division by zero, line 3 of solution.py"),
        ("def other(): pass", "solution.py defines no 'count_transformer'"),
        ("def count(:", "raised SyntaxError: invalid syntax (solution.py, line 2)"),
        ("def count(*x): print('{}')", "another form than the statement requires"),
        ("def count(*x): return {1, 2}", "a value of type set was returned"),
        ("import experiments.course", "No module named 'experiments.course'"),
        ("import checks\ndef count(*x): return {}", "has no 'total_params'"),
        ("def count(*x):\n    os.closerange(0, 99)\n    time.sleep(99)", "closed the"),
        ("def count(*x):\n    while 1: os.write(3, b'x' * 4096)", "an endless loop?"),
        ("def count(*x): raise OSError('\\ud800\\x1b')", "raised OSError:   , line 2"),
    ],
)
def test_any_failure_of_a_solution_is_a_failed_test(
    text: str, words: str, tmp_path: Path
) -> None:
    tests = TESTS["model_counter"][:1]
    text = "import os, time\n" + text.replace("count(", "count_transformer(")
    results = grade_text(tmp_path, "model_counter", text, tests, limit_s=2.0)
    [row] = results["tests"]
    assert (row["status"], results["score"]) == ("failed", 0)
    assert words in row["output"]


def test_the_time_of_all_calls_is_limited(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grading, "TOTAL_LIMIT_S", 0.0)
    results = grade_text(tmp_path, "page_allocator", "class PageAllocator: pass")
    assert results["score"] == 0
    assert all("all calls together" in x["output"] for x in results["tests"])


def test_a_skeleton_is_not_implemented(tmp_path: Path) -> None:
    for name in assignments.ASSIGNMENTS:
        skeleton = assignments.make_skeleton(name)
        assert "SOLUTION" not in skeleton
        assert skeleton.count("raise NotImplementedError") >= 1
    text = assignments.make_skeleton("online_softmax")
    results = grade_text(tmp_path, "online_softmax", text)
    assert results["score"] == 0
    assert "start_rows is not implemented, line " in results["tests"][0]["output"]


def test_a_count_is_implausible_only_far_from_its_share() -> None:
    path = assignments.HOME / "speculative_verifier" / "checks.py"
    checks = grading.load_file(path)
    # At least 39 heads of 40 have the probability 41 / 2**40, 33 or more 2e-5.
    assert not checks.is_plausible(39, 40, 0.5, 1)
    assert checks.is_plausible(33, 40, 0.5, 1)
    assert not checks.is_plausible(1, 10, 0.0, 1)
    assert checks.is_plausible(0, 10, 0.0, 1)


@pytest.mark.parametrize("name", TESTS)
def test_a_handout_has_no_solution_and_no_hidden_test(
    name: str, tmp_path: Path
) -> None:
    called = run_command(["course", "handout", name, "--out", str(tmp_path / "h")])
    assert called == 0
    names = {path.name for path in (tmp_path / "h").iterdir()}
    assert names == {
        *("statement.md", "skeleton.py", "grading.py", "checks.py"),
        "public_tests.json",
    }
    text = "".join(path.read_text("utf-8") for path in (tmp_path / "h").iterdir())
    hidden = [x.name for x in TESTS[name] if x.visibility == "after_due_date"]
    assert hidden
    assert not [x for x in hidden if f'"{x}"' in text]
    reference = (assignments.HOME / name / "reference.py").read_text("utf-8")
    solution = {*reference.split("\n")} - {*assignments.make_skeleton(name).split("\n")}
    assert not [x for x in solution if len(x) > 30 and x in text]


@pytest.mark.parametrize("is_submitted", [True, False])
def test_an_autograder_writes_results(tmp_path: Path, is_submitted: bool) -> None:
    path = tmp_path / "new" / "autograder.zip"
    assignments.write_autograder("page_allocator", path, seed=3)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "source")
        modes = [archive.getinfo(x).external_attr >> 16 for x in ("run_autograder",)]
    assert modes[0] & 0o111
    assert (tmp_path / "source" / "setup.sh").read_text().startswith("#!")
    submission = tmp_path / "submission"
    submission.mkdir()
    if is_submitted:
        reference = assignments.HOME / "page_allocator" / "reference.py"
        (submission / "solution.py").write_bytes(reference.read_bytes())
    subprocess.run(
        [
            *(sys.executable, tmp_path / "source" / "grading.py", submission),
            *("--results", tmp_path / "results" / "results.json"),
        ],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
    )
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["max_score"] == 100
    assert results["score"] == (100 if is_submitted else 0)
    if is_submitted:
        visible = {x["visibility"] for x in results["tests"]}
        assert visible == {"visible", "after_due_date"}
        keys = {"name", "score", "max_score", "output", "status", "visibility"}
        assert all(x.keys() == keys for x in results["tests"])


def test_hidden_tests_depend_on_the_seed() -> None:
    first, second = (
        list(assignments.make_tests("speculative_verifier", seed, is_hidden=True))
        for seed in (0, 1)
    )
    assert [x.name for x in first] == [x.name for x in second]
    assert first[1].case != second[1].case


def test_the_command_grades(capsys, tmp_path: Path) -> None:
    course = commands.command(capsys, "course")
    reference = assignments.HOME / "page_allocator" / "reference.py"
    words = ["grade", "page_allocator", "--solution", str(reference)]
    graded = commands.document(course, *words, "--out", str(tmp_path / "results.json"))
    assert graded["score"] == 100
    assert json.loads((tmp_path / "results.json").read_text())["score"] == 100
    (tmp_path / "class" / "no_file").mkdir(parents=True)
    (tmp_path / "class" / "empty.py").touch()
    graded = commands.document(course, *words[:3], str(tmp_path / "class"))
    assert {x: (y["score"], len(y["tests"])) for x, y in graded.items()} == {
        "empty.py": (0, 6),
        "no_file": (0, 0),
    }
    listed = commands.document(course)
    assert [x["name"] for x in listed["assignments"]] == [*assignments.ASSIGNMENTS]
    assert listed["topics"][0].keys() == {"topic", "command", "processor_s", "page"}
    refuse = commands.assert_refused
    refuse(course, "mark", "unknown action")
    refuse(course, "grade tables", "unknown assignment")
    refuse(course, "handout page_allocator", "--out")
    refuse(course, "handout page_allocator --out x --seed 1", "--seed")
    refuse(course, "grade page_allocator --solution no.py", "must be a Python file")
    refuse(course, f"handout page_allocator --out {tmp_path}", "exists")


# Live commands


class Parsed(BaseException):
    """Ends a command after its options have been parsed."""


def test_the_topics_cover_the_lectures() -> None:
    topics = command.read_topics()
    assert len(topics) == len({x.topic for x in topics})
    for topic in topics:
        assert (assignments.HOME / topic.page).resolve().is_file()
        assert 0 < topic.processor_s / 1.6 < 120  # wall time on two idle cores
    linked = {Path(x.page).name for x in topics if "/topics/" in x.page}
    pages = {path.name for path in (ROOT / "docs" / "topics").glob("*.md")}
    assert linked == pages - {"index.md"}


def split_commands(text: str) -> list[list[str]]:
    """Returns the words of each command after `jaxkv`."""
    parts = [shlex.split(x) for x in text.split("&&")]
    assert all(words[0] == "jaxkv" for words in parts)
    return [words[1:] for words in parts]


@pytest.mark.parametrize("topic", command.read_topics(), ids=lambda x: x.topic)
def test_a_live_command_parses(topic, monkeypatch) -> None:
    configs = {entry.name: entry.configs for entry in framework.entries()}
    parse = parsing.tyro.cli
    # Otherwise `--out` and `--max-seconds` are parsed without tyro.
    monkeypatch.setattr(arguments, "_COMMON_FLAGS", ())

    def parse_and_end(*args, **options):
        parse(*args, **options)
        raise Parsed

    monkeypatch.setattr(parsing.tyro, "cli", parse_and_end)
    for words in split_commands(topic.command):
        assert words[0] in COMMANDS
        if words[0] == "run" and len(words) == 3:
            assert words[2] in configs[words[1]]
        elif words != ["demo"]:
            with pytest.raises(Parsed):
                run_command(words)


@pytest.mark.slow
@pytest.mark.parametrize("topic", command.read_topics(), ids=lambda x: x.topic)
def test_a_live_command_runs(topic, tmp_path: Path) -> None:
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    for words in split_commands(topic.command):
        subprocess.run(
            [sys.executable, "-m", "jaxkv.cli.main", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
