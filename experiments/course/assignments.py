"""Assignments: hand-outs, autograders and grades, made from one source.

The folder of an assignment has a statement, `checks.py`, and `reference.py`. In the
reference, the lines between `# SOLUTION` and `# END` are the solution; the skeleton is
the file without them.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.course import grading
from jaxkv import files

HOME = Path(__file__).parent


class Assignment(NamedTuple):
    """An assignment.

    Attributes:
      title: title of its statement.
      hours: estimated time of an average student.
      packages: packages that the solution and the grader need.
      limit_s: time limit of one call of the solution in s.
    """

    title: str
    hours: str
    packages: tuple[str, ...] = ("numpy",)
    limit_s: float = 20.0


ASSIGNMENTS = {
    "page_allocator": Assignment("A page allocator with copy-on-write", "2 to 3"),
    "batching_policy": Assignment(
        "A policy of continuous batching", "3 to 4", ("jaxkv",), 90.0
    ),
    "speculative_verifier": Assignment("A verifier for speculative decoding", "2 to 3"),
    "online_softmax": Assignment("Online softmax: attention in one pass", "2 to 3"),
    "model_counter": Assignment("Counting parameters, FLOPs and memory", "2 to 3"),
    "budgeted_design": Assignment(
        "From a sweep to a budgeted design", "3 to 4", ("numpy", "scipy")
    ),
}

_SOLUTION = re.compile(r"^( *)# SOLUTION\n.*?^ *# END\n", re.DOTALL | re.MULTILINE)

_SETUP = """#!/usr/bin/env bash
set -e
apt-get update
apt-get install -y python3 python3-venv
python3 -c 'import sys; sys.exit(sys.version_info < (3, 12) and "needs Python 3.12")'
python3 -m venv /autograder/env
/autograder/env/bin/pip install {packages}
"""
# The solution runs as a user without rights to read the tests or to write results.
_RUN = """#!/usr/bin/env bash
chmod -R go-rwx /autograder/source /autograder/results
/autograder/env/bin/python /autograder/source/grading.py /autograder/submission \\
  --results /autograder/results/results.json --user nobody
"""


def make_skeleton(name: str) -> str:
    """Returns the reference solution of an assignment without the solution."""
    text = (HOME / name / "reference.py").read_text(encoding="utf-8")
    return _SOLUTION.sub(r"\1raise NotImplementedError\n", text)


def make_tests(
    name: str, seed: int, *, is_hidden: bool
) -> Iterator[grading.GradedTest]:
    """Yields the public tests of an assignment, or the hidden ones of a seed."""
    import numpy as np

    from experiments.course.cases import CASES

    visibility = "after_due_date" if is_hidden else "visible"
    rng = np.random.default_rng([seed * is_hidden, is_hidden])
    for case in CASES[name](rng, is_hidden):
        yield grading.GradedTest(*case, visibility)


def grade_solutions(
    name: str, solutions: Iterable[Path], seed: int = 0, user: str | None = None
) -> Iterator[dict[str, Any]]:
    """Grades solutions by the public and hidden tests; see `grading.grade`."""
    tests = [x for h in (False, True) for x in make_tests(name, seed, is_hidden=h)]
    checks = HOME / name / "checks.py"
    for solution in solutions:
        yield grading.grade(solution, checks, tests, ASSIGNMENTS[name].limit_s, user)


def write_handout(name: str, out: Path) -> None:
    """Writes what students get: statement, skeleton, public tests and their grader."""
    with _open_folder(out) as folder:
        _write_grader(name, folder)
        shutil.copyfile(HOME / name / "statement.md", folder / "statement.md")
        (folder / "skeleton.py").write_text(make_skeleton(name), encoding="utf-8")


def write_autograder(
    name: str, out: Path, *, seed: int = 0, wheel: Path | None = None
) -> None:
    """Writes an autograder for Gradescope.

    Args:
      name: the assignment.
      out: new folder, or file of the type zip.
      seed: seed of the hidden tests.
      wheel: wheel of this project, for an assignment that needs it.
    """
    packages = " ".join(ASSIGNMENTS[name].packages)
    if (packages == "jaxkv") != (wheel is not None):
        needs = "needs" if wheel is None else "does not need"
        raise ValueError(f"wheel={wheel}: {name} {needs} a wheel of jaxkv")
    with _open_folder(out) as folder:
        _write_grader(name, folder, seed)
        if wheel is not None:
            shutil.copyfile(wheel, folder / wheel.name)
            packages = f"/autograder/source/{wheel.name}"
        scripts = {"setup.sh": _SETUP.format(packages=packages), "run_autograder": _RUN}
        for script, text in scripts.items():
            (folder / script).write_text(text, encoding="utf-8")
            (folder / script).chmod(0o755)


@contextlib.contextmanager
def _open_folder(out: Path) -> Generator[Path]:
    """Yields a folder to fill: a new one at `out`, or one that becomes a zip file."""
    if out.exists():
        raise ValueError(f"out={out} exists; choose a new folder or zip file")
    if out.suffix != ".zip":
        with files.replace_folder(out) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        (folder := Path(scratch, "folder")).mkdir()
        yield folder
        archive = shutil.make_archive(str(Path(scratch, "archive")), "zip", folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(out, Path(archive).read_bytes())


def _write_grader(name: str, folder: Path, seed: int | None = None) -> None:
    """Writes a grader with the public tests, and with the hidden ones of a seed."""
    shutil.copyfile(HOME / "grading.py", folder / "grading.py")
    shutil.copyfile(HOME / name / "checks.py", folder / "checks.py")
    for is_hidden in (False,) if seed is None else (False, True):
        tests = [x._asdict() for x in make_tests(name, seed or 0, is_hidden=is_hidden)]
        document = {"limit_s": ASSIGNMENTS[name].limit_s, "tests": tests}
        file = folder / f"{'hidden' if is_hidden else 'public'}_tests.json"
        file.write_text(json.dumps(document, indent=1), encoding="utf-8")
