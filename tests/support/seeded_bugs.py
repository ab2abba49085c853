"""Seeded bugs in copies of the tree: `python -m tests.support.seeded_bugs [names]`.

`tests/seeded_bugs.toml` lists them. Each bug is applied to its own copy, in which the
listed test files run until the first failure. A bug is caught if a test fails with it;
`--clean` runs the same files without the bug, which must all pass.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.support import folders

PATH = folders.ROOT / "tests" / "seeded_bugs.toml"


class SeededBug(NamedTuple):
    """A wrong line, and the test files that must fail with it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: list[str]


def load() -> list[SeededBug]:
    """Returns the listed bugs."""
    tables = tomllib.loads(PATH.read_text("utf-8"))
    return [SeededBug(name, **fields) for name, fields in tables.items()]


def copy_tree(target: Path) -> None:
    """Copies the tracked files, as they are in the working tree."""
    command = ["git", "ls-files", "-z"]
    listing = subprocess.check_output(command, cwd=folders.ROOT, text=True)
    for name in listing.split("\0"):
        if (folders.ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folders.ROOT / name, target / name)


def run(bug: SeededBug, is_clean: bool) -> str:
    """Returns the outcome: caught or not, the seconds, the first failing test."""
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        path = Path(folder, bug.file)
        text = path.read_text("utf-8")
        if text.count(bug.right) != 1:
            return "the original text does not occur exactly once"
        if not is_clean:
            path.write_text(text.replace(bug.right, bug.wrong), "utf-8")
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
        start = time.monotonic()
        process = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *bug.tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            text=True,
            capture_output=True,
        )
        seconds = time.monotonic() - start
    outcomes = {0: "not caught", 1: "caught"}
    outcome = outcomes.get(process.returncode, f"pytest exits {process.returncode}")
    lines = process.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return f"{outcome:10} {seconds:6.1f} s  {' '.join(failures)[:120]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs; all by default")
    parser.add_argument("--clean", action="store_true", help="run without the bug")
    options = parser.parse_args()
    for bug in load():
        if not options.names or bug.name in options.names:
            print(f"{bug.name:32} {run(bug, options.clean)}", flush=True)


if __name__ == "__main__":
    main()
