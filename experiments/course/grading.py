"""Grades a solution of an assignment: `python grading.py SOLUTION`.

The file needs the standard library only, since hand-outs and autograders have a copy.
The tests run in this process, which has the expected answers. The solution runs in
another process, which receives the inputs of one call at a time; an exception, an
endless loop or the end of that process is a failed test.
"""

import argparse
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

LIMIT_S = 10.0
"""Default time limit of one call in s."""
START_LIMIT_S = 120.0
"""Time limit of the start of Python, which is not part of a call."""
MAX_SHOWN = 1500
"""Largest number of characters of a message."""


class GradedTest(NamedTuple):
    """A test of an assignment.

    Attributes:
      name: what is tested, in one line.
      max_score: points, granted in full or not at all.
      check: name of a function of `checks.py` that returns the violation, or "".
      case: arguments of the function, expected answers included.
      visibility: Gradescope's `visible` or `after_due_date`.
    """

    name: str
    max_score: float
    check: str
    case: dict[str, Any]
    visibility: str = "visible"


class SolutionError(Exception):
    """A call of the solution gave no answer; the message has the reason."""


class SolutionProcess:
    """The process of a solution.

    Args:
      solution: file of the solution.
      checks: file with the functions `drive_NAME`, which `call` prefers.
      limit_s: time limit of one call.
      user: user of the process; None means the user of this one.
    """

    def __init__(
        self,
        solution: Path,
        checks: Path,
        limit_s: float = LIMIT_S,
        user: str | None = None,
    ) -> None:
        self._limit_s = limit_s
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        # A folder without the tests, readable by another user.
        self._folder = tempfile.TemporaryDirectory(prefix="solution-")
        os.chmod(self._folder.name, 0o755)
        for source, name in (
            (solution, "solution.py"),
            (checks, "checks.py"),
            (Path(__file__), "grading.py"),
        ):
            shutil.copyfile(source, Path(self._folder.name, name))

    def call(self, name: str, *arguments: object) -> Any:
        """Calls `drive_NAME` of the checks, or a function of the solution.

        Raises:
          SolutionError: there is no answer.
        """
        process = self.start() if self._process is None else self._process
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            pass  # The process has ended, which the read below reports.
        answer = json.loads(self._read_line(process, name, self._limit_s))
        if "error" in answer:
            raise SolutionError(answer["error"])
        return answer["value"]

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process; the solution is imported by the first call."""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(self._folder.name, "grading.py")), "--process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._folder.name,
            user=self._user,
            start_new_session=True,
        )
        self._read_line(self._process, "python", START_LIMIT_S)
        return self._process

    def _read_line(
        self, process: subprocess.Popen[bytes], name: str, limit_s: float
    ) -> bytes:
        """Reads a line of the process; without one, ends it and raises an error."""
        assert process.stdout is not None
        line = b""
        end = time.monotonic() + limit_s
        while not line.endswith(b"\n"):
            wait_s = max(end - time.monotonic(), 0.0)
            if not select.select([process.stdout], [], [], wait_s)[0]:
                self.stop()
                raise SolutionError(
                    f"{name} has not returned after {limit_s:g} s: is there an endless "
                    "loop?"
                )
            if not (part := os.read(process.stdout.fileno(), 1 << 16)):
                status = process.wait()
                self.stop()
                raise SolutionError(
                    f"{name} ended the process (exit status {status}) without an answer"
                )
            line += part
        return line

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            for stream in (self._process.stdin, self._process.stdout):
                try:
                    stream and stream.close()
                except OSError:
                    pass
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Ends the process, and removes its folder."""
        self.stop()
        self._folder.cleanup()


def _answer_calls() -> None:
    """Answers the calls of `SolutionProcess` in the folder of this file."""
    calls = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    # Prints of the solution are for the terminal, and its input is empty.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # An installed package may contain the reference solutions.
    sys.modules["experiments"] = None  # ty: ignore[invalid-assignment]
    folder = Path(__file__).parent
    checks = load_file(folder / "checks.py")
    answers.write("ready\n")
    answers.flush()
    for line in calls:
        name, arguments = json.loads(line)
        try:
            solution = load_file(folder / "solution.py")
            driver = getattr(checks, f"drive_{name}", None)
            if driver is None and not hasattr(solution, name):
                raise AttributeError(f"solution.py defines no '{name}'")
            value = (
                driver(solution, *arguments)
                if driver
                else getattr(solution, name)(*arguments)
            )
            text = json.dumps({"value": value}, default=_to_plain)
        except BaseException as error:
            text = json.dumps({"error": _describe_error(name, error)})
        answers.write(text + "\n")
        answers.flush()


def _to_plain(value: Any) -> object:
    if hasattr(value, "tolist"):  # an array
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} was returned")


def _describe_error(name: str, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [x.lineno for x in frames if Path(x.filename).name == "solution.py"]
    if isinstance(error, AttributeError) and not lines:
        missing = "module 'solution' has no attribute"
        return str(error).replace(missing, "solution.py defines no")
    place = f", line {lines[-1]} of solution.py" if lines else ""
    kind = type(error).__name__
    if isinstance(error, NotImplementedError):
        return f"{name} is not implemented{place}"
    return f"{name} raised {kind}: {error}"[:MAX_SHOWN] + place


_LOADED: dict[Path, ModuleType] = {}


def load_file(path: Path) -> ModuleType:
    """Imports a Python file once, under the name of its stem."""
    if path not in _LOADED:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        _LOADED[path] = module
    return _LOADED[path]


def grade(
    solution: Path,
    checks: Path,
    tests: list[GradedTest],
    limit_s: float = LIMIT_S,
    user: str | None = None,
) -> dict[str, Any]:
    """Grades a solution.

    Args:
      solution: the file.
      checks: the file with the check functions.
      tests: the tests.
      limit_s: time limit of one call in s.
      user: user of the process of the solution; None means the user of this one.

    Returns:
      Gradescope's `results.json`: `score`, `max_score`, `output`, and `tests` with
      `name`, `score`, `max_score`, `output`, `status` and `visibility`.
    """
    start = time.monotonic()
    functions = load_file(checks)
    process = SolutionProcess(solution, checks, limit_s, user)
    process.start()  # an error here is not one of the solution
    rows: list[dict[str, Any]] = []
    for test in tests:
        try:
            violation = getattr(functions, test.check)(process, **test.case)
        except SolutionError as error:
            violation = str(error)
        except Exception as error:  # an answer of another form, such as None
            violation = (
                "the answer has another form than the statement requires "
                f"({type(error).__name__}: {error})"
            )
        rows.append(
            {
                "name": test.name,
                "score": 0.0 if violation else test.max_score,
                "max_score": test.max_score,
                "status": "failed" if violation else "passed",
                "output": violation[:MAX_SHOWN] or "passed",
                "visibility": test.visibility,
            }
        )
    process.close()
    score = sum(row["score"] for row in rows)
    num_passed = sum(row["status"] == "passed" for row in rows)
    return {
        "score": score,
        "max_score": sum(row["max_score"] for row in rows),
        "output": f"{num_passed} of {len(rows)} tests passed.",
        "execution_time": round(time.monotonic() - start, 3),
        "tests": rows,
    }


def read_tests(folder: Path) -> tuple[list[GradedTest], float]:
    """Reads the public and, if present, hidden tests, and the limit of a call in s."""
    tests = []
    limit_s = LIMIT_S
    for path in sorted(folder.glob("*_tests.json"), reverse=True):
        document = json.loads(path.read_text(encoding="utf-8"))
        limit_s = document["limit_s"]
        tests += [GradedTest(**x) for x in document["tests"]]
    return tests, limit_s


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("solution", type=Path, help="file, or a folder with one")
    parser.add_argument("--results", type=Path, help="file for results.json")
    parser.add_argument("--user", help="user that runs the solution")
    options = parser.parse_args()
    solution = options.solution
    if solution.is_dir():
        files = sorted(solution.glob("*.py"))
        named = [x for x in files if x.name == "solution.py"]
        solution = (named or files or [solution / "solution.py"])[0]
    folder = Path(__file__).resolve().parent
    tests, limit_s = read_tests(folder)
    results: dict[str, Any]
    if solution.is_file():
        results = grade(solution, folder / "checks.py", tests, limit_s, options.user)
    else:
        max_score = sum(x.max_score for x in tests)
        results = {"score": 0.0, "max_score": max_score, "tests": []}
        results["output"] = "The submission has no solution.py."
    for row in results["tests"]:
        print(f"{row['score']:g}/{row['max_score']:g} {row['name']}: {row['output']}")
    print(f"{results['score']:g}/{results['max_score']:g} {results['output']}")
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--process"]:
        _answer_calls()
    else:
        sys.exit(_main())
