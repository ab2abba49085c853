"""Seeds the bugs of `tests/seeded_bugs.toml` into a copy of the tree.

`python -m tests.support.seeded_bugs [NAME ...]` runs the test files of each bug, prints
`caught` or `missed` with the seconds, and exits with status 1 if a bug is missed.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from typing import NamedTuple

from tests.support.folders import ROOT

_TESTS_FAILED = 1
_LIMIT_S = 300


class SeededBug(NamedTuple):
    """A wrong text in a file, and the test files that must fail with it."""

    name: str
    file: str
    original: str
    """Text that occurs exactly once in the file."""
    wrong: str
    tests: list[str]
    """Files of the quick suite, relative to `tests/`."""


def load_bugs() -> list[SeededBug]:
    """Returns the seeded bugs of the list."""
    text = (ROOT / "tests/seeded_bugs.toml").read_text("utf-8")
    return [SeededBug(**bug) for bug in tomllib.loads(text)["bugs"]]


def _copy_tree(target: pathlib.Path) -> None:
    """Copies the files that git tracks, as they are in the working tree."""
    command = ["git", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listing.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _run_tests(tree: pathlib.Path, bug: SeededBug) -> tuple[str, str]:
    """Returns `caught` or `missed`, and the end of pytest's output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-n", "0", *(f"tests/{file}" for file in bug.tests)]
    env = os.environ | {"PYTHONPATH": str(tree)}
    try:
        ran = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "missed", f"no result within {_LIMIT_S} s"
    output = (ran.stdout.strip() or ran.stderr.strip()).splitlines()
    failures = [line for line in output if line.startswith(("FAILED", "ERROR"))]
    reason = next(iter(failures), output[-1] if output else "")
    return "caught" if ran.returncode == _TESTS_FAILED else "missed", reason


def main(names: list[str]) -> int:
    """Runs the bugs of these names, or all, and returns the exit status."""
    bugs = [bug for bug in load_bugs() if not names or bug.name in names]
    if unknown := {*names} - {bug.name for bug in bugs}:
        print(f"no such bugs: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    num_missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        _copy_tree(tree)
        for bug in bugs:
            path = tree / bug.file
            text = path.read_text("utf-8")
            times = path.stat()
            path.write_text(text.replace(bug.original, bug.wrong), "utf-8")
            started = time.monotonic()
            verdict, reason = _run_tests(tree, bug)
            seconds = time.monotonic() - started
            path.write_text(text, "utf-8")
            # Python compares this time with that of the cached byte code.
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            num_missed += verdict == "missed"
            print(f"{verdict}  {bug.name}  {seconds:.0f} s  {reason}", flush=True)
    print(f"{len(bugs) - num_missed} of {len(bugs)} caught")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
