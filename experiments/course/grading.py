"""Grades a solution of an assignment: `python grading.py SOLUTION`.

The file needs the standard library only, since hand-outs and autograders have a copy.
The tests run in this process, which has the expected answers. The solution runs in
another process, which receives the inputs of one call at a time; an exception, an
endless loop or the end of that process is a failed test.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TOTAL_LIMIT_S = 480.0
"""Time limit of all calls in s; Gradescope ends an autograder after 600 s."""
START_LIMIT_S = 120.0
"""Time limit of the start of Python in s, which is not part of a call."""
MAX_ANSWER = 1 << 24
"""Largest number of bytes of an answer."""
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


class SolutionError(ValueError):
    """A call of the solution gave no answer; the message has the reason."""


class SolutionProcess:
    """The process of a solution, which imports the solution at the first call.

    Args:
      solution: file of the solution.
      checks: file with the functions `drive_NAME`, which `call` prefers.
      limit_s: time limit of one call.
      user: user of the process; None means the user of this one.
    """

    def __init__(
        self, solution: Path, checks: Path, limit_s: float, user: str | None
    ) -> None:
        self._limit_s = limit_s
        self._left_s = TOTAL_LIMIT_S
        self._user = user
        self._group = {x.pw_name: x.pw_gid for x in pwd.getpwall()}.get(user or "")
        if user and self._group is None:
            raise SolutionError(f"user={user} must be a user of this machine")
        # A folder without the tests, readable by another user.
        self._folder = tempfile.TemporaryDirectory(
            prefix="solution-", ignore_cleanup_errors=True
        )
        self._script = Path(self._folder.name, "grading.py")
        self._script.parent.chmod(0o755)
        shutil.copyfile(solution, self._script.with_name("solution.py"))
        shutil.copyfile(checks, self._script.with_name("checks.py"))
        shutil.copyfile(__file__, self._script)
        self._start()

    def _start(self) -> None:
        self._channel, other_end = socket.socketpair()
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, str(self._script), "--process"],
                stdin=other_end.fileno(),
                stdout=2,
                cwd=self._folder.name,
                start_new_session=True,
                user=self._user,
                group=self._group,
                extra_groups=None if self._user is None else [],
            )
        self._exchange("python", b"", START_LIMIT_S)

    def call(self, name: str, *arguments: object) -> Any:
        """Calls `drive_NAME` of the checks, or a function of the solution.

        Raises:
          SolutionError: there is no answer.
        """
        if self._left_s <= 0:
            limit = f"all calls together may take {TOTAL_LIMIT_S:g} s"
            raise SolutionError(f"{name} was not called: {limit}")
        if self._process.returncode is not None:
            self._start()
        request = json.dumps([name, arguments]).encode() + b"\n"
        start = time.monotonic()
        try:
            limit_s = min(self._limit_s, self._left_s)
            answer = json.loads(self._exchange(name, request, limit_s))
        finally:
            self._left_s -= time.monotonic() - start
        if "error" in answer:
            raise SolutionError(answer["error"])
        return answer["value"]

    def _exchange(self, name: str, request: bytes, limit_s: float) -> bytes:
        """Returns the line that answers a request; without one, ends the process."""
        end = time.monotonic() + limit_s
        line = b""
        try:
            self._channel.settimeout(limit_s)
            self._channel.sendall(request)
            while not line.endswith(b"\n"):
                self._channel.settimeout(max(end - time.monotonic(), 1e-3))
                part = self._channel.recv(1 << 20)
                line += part
                if not part:
                    raise ConnectionError
                if len(line) > MAX_ANSWER or time.monotonic() > end:
                    raise TimeoutError
            return line
        except TimeoutError:
            reason = f"has not returned after {limit_s:g} s: is there an endless loop?"
        except OSError:
            try:
                status = self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                reason = "closed the connection to the grader"
            else:
                cause = signal.strsignal(-status) if status < 0 else None
                cause = cause or f"exit status {status}"
                reason = f"ended the process ({cause}) without an answer"
        self.stop()
        raise SolutionError(f"{name} {reason}")

    def stop(self) -> None:
        """Ends the process and those that it started in its session."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def close(self) -> None:
        """Ends the process, and removes its folder."""
        self.stop()
        self._folder.cleanup()


def _answer_calls() -> None:
    """Answers the calls of `SolutionProcess` in the folder of this file."""
    channel = socket.socket(fileno=os.dup(0)).makefile("rw")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # the solution has no input
    limits = {resource.RLIMIT_DATA: 1 << 32, resource.RLIMIT_FSIZE: 1 << 28}
    script = Path(__file__)
    if script.stat().st_uid != os.getuid():  # another user
        limits[resource.RLIMIT_NPROC] = 512  # counts all processes of the user
        os.dup2(null, 1)
        os.dup2(null, 2)
    for kind, limit in limits.items():
        limit = min(limit, resource.getrlimit(kind)[1] % 2**63)  # -1 is no limit
        resource.setrlimit(kind, (limit, limit))
    # An installed package may contain the reference solutions.
    sys.modules["experiments"] = None  # ty: ignore[invalid-assignment]
    checks = load_file(script.with_name("checks.py"))
    print("ready", file=channel, flush=True)
    for line in channel:
        name, arguments = json.loads(line)
        try:
            solution = load_file(script.with_name("solution.py"))
            driver = getattr(checks, f"drive_{name}", None)
            value = (
                driver(solution, *arguments)
                if driver
                else getattr(solution, name)(*arguments)
            )
            text = json.dumps({"value": value}, default=_to_plain)
        except BaseException as error:
            text = json.dumps({"error": _describe_error(name, error)})
        print(text, file=channel, flush=True)


def _to_plain(value: Any) -> object:
    if hasattr(value, "tolist"):  # an array
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} was returned")


def _describe_error(name: str, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    frames = [x for x in frames if Path(x.filename).name == "solution.py"]
    place = ""
    if frames:
        name = frames[-1].name.replace("<module>", "solution.py")
        place = f", line {frames[-1].lineno} of solution.py"
    elif isinstance(error, AttributeError):
        missing = "module 'solution' has no attribute"
        return str(error).replace(missing, "solution.py defines no")
    if isinstance(error, NotImplementedError):
        return f"{name} is not implemented{place}"
    return f"{name} raised {type(error).__name__}: {error}"[:MAX_SHOWN] + place


@functools.cache
def load_file(path: Path) -> ModuleType:
    """Imports a Python file once, under the name of its stem."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def grade(
    solution: Path,
    checks: Path,
    tests: list[GradedTest],
    limit_s: float = 10.0,
    user: str | None = None,
) -> dict[str, Any]:
    """Grades a solution.

    Args:
      solution: the file, or a folder with `solution.py` or a single Python file.
      checks: the file with the check functions.
      tests: the tests.
      limit_s: time limit of one call in s.
      user: user of the process of the solution; None means the user of this one.

    Returns:
      Gradescope's `results.json`: `score`, `max_score`, `output`, and `tests` with
      `name`, `score`, `max_score`, `output`, `status` and `visibility`.
    """
    max_score = sum(x.max_score for x in tests)
    results = {"score": 0.0, "max_score": max_score, "tests": []}
    if solution.is_dir():
        files = [*solution.glob("*.py")]
        solution /= files[0].name if len(files) == 1 else "solution.py"
    if not solution.is_file():
        return results | {"output": "The submission has no solution.py."}
    functions = load_file(checks)
    # An error here is not one of the solution.
    process = SolutionProcess(solution, checks, limit_s, user)
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
        # Not printable: control sequences of a terminal, halves of surrogate pairs.
        shown = [x if x.isprintable() else " " for x in violation[:MAX_SHOWN]]
        rows.append(
            {
                "name": test.name,
                "score": 0.0 if violation else test.max_score,
                "max_score": test.max_score,
                "status": "failed" if violation else "passed",
                "output": "".join(shown) or "passed",
                "visibility": test.visibility,
            }
        )
    process.close()
    num_passed = sum(row["status"] == "passed" for row in rows)
    return results | {
        "score": sum(row["score"] for row in rows),
        "output": f"{num_passed} of {len(rows)} tests passed.",
        "tests": rows,
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("solution", type=Path, help="file, or a folder with one")
    parser.add_argument("--results", type=Path, help="file for results.json")
    parser.add_argument("--user", help="user that runs the solution")
    options = parser.parse_args()
    folder = Path(__file__).resolve().parent
    paths = sorted(folder.glob("*_tests.json"), reverse=True)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    tests = [GradedTest(**x) for document in documents for x in document["tests"]]
    limit_s = documents[0]["limit_s"]
    checks = folder / "checks.py"
    results = grade(options.solution, checks, tests, limit_s, options.user)
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    for row in results["tests"]:
        print(f"{row['score']:g}/{row['max_score']:g} {row['name']}: {row['output']}")
    print(f"{results['score']:g}/{results['max_score']:g} {results['output']}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--process"]:
        _answer_calls()
    else:
        _main()
