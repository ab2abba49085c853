"""A process that makes a record again, perhaps in pieces.

It is the code of a clean commit in a process of its own, into a folder next to its log,
and replaces the old record, with its row of the table, when it is complete. It is
paused at the end of a call, and the next call continues it, so that no experiment needs
checkpoints. A record whose numbers are times is never paused.
"""

import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from experiments import framework
from experiments.cli.record_list import CODE, Record, config_name, git
from experiments.cli.results_page import RECORDS
from jaxkv import files
from jaxkv.report import dumps, read_run, render_report, replace_run

_POLL_S = 0.5


def time_fixed_product() -> float:
    """Returns the median seconds of a product of two 1,024 x 1,024 float32 matrices."""
    matrix = np.ones((1024, 1024), np.float32)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        _ = matrix @ matrix
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@dataclasses.dataclass
class _Process:
    """A process that makes a record, as kept between calls."""

    pid: int
    yardstick_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds of the fixed product at the start and the end of each call."""
    load_average: list[float] = dataclasses.field(default_factory=list)
    """Load average at the same moments."""
    paused_at_s: float | None = None
    """Time at which the process was paused; None while it runs."""
    paused_s: float = 0.0
    """Seconds of all pauses."""

    def measure_machine(self) -> None:
        """Appends the time of the fixed product, and the load average."""
        self.load_average.append(os.getloadavg()[0])
        self.yardstick_s.append(time_fixed_product())

    def pause(self) -> None:
        """Pauses the process and its children."""
        os.killpg(self.pid, signal.SIGSTOP)
        self.paused_at_s = time.time()

    def continue_(self) -> None:
        """Continues the process if it is paused."""
        if self.paused_at_s is not None:
            os.killpg(self.pid, signal.SIGCONT)
            self.paused_s += time.time() - self.paused_at_s
            self.paused_at_s = None


class Remaking:
    """The process that makes a record again, perhaps begun by an earlier call."""

    def __init__(self, record: Record, scratch: Path) -> None:
        self._record = record
        self._folder = scratch / record.name
        self._state_path = scratch / f"{record.name}.json"

    def advance(self, end_s: float) -> str:
        """Starts or continues the process; returns a line once it has ended, or "".

        Args:
          end_s: time by `time.monotonic` at which the process is paused; a process that
            measures times is not started if it would last longer.
        """
        record = self._record
        expected_s = record.env["duration_s"]
        print(f"{record.name}: {expected_s:.0f} s when last made", file=sys.stderr)
        if record.is_timed and time.monotonic() + expected_s > end_s:
            print("  not started: a run with times needs one piece", file=sys.stderr)
            return ""
        child = None
        process = self._load()
        if process is None:
            process = _Process(0)
            process.measure_machine()
            child = self._start()
            process.pid = child.pid
        else:
            process.measure_machine()
            process.continue_()
        try:
            while (is_running := _is_running(process.pid, child)) and (
                record.is_timed or time.monotonic() < end_s
            ):
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            self._state_path.unlink(missing_ok=True)
            raise
        if is_running:
            process.pause()
        process.measure_machine()
        files.write_atomically(
            self._state_path, json.dumps(dataclasses.asdict(process))
        )
        return "" if is_running else self._finish(process)

    def _load(self) -> _Process | None:
        """Returns the process of an earlier call; None if there is none."""
        if not self._state_path.exists():
            return None
        process = _Process(**files.read_json(self._state_path))
        env = self._folder / "env.json"
        commit = files.read_json(env)["commit"] if env.exists() else "HEAD"
        is_same_code = git("diff", "--quiet", commit, "HEAD", *CODE) is not None
        is_running = _is_running(process.pid)
        if is_same_code and (is_running or self._is_done()):
            return process
        # A process of other code, or one that ended with the machine, starts again.
        if is_running:
            os.killpg(process.pid, signal.SIGKILL)
        return None

    def _is_done(self) -> bool:
        env = self._folder / "env.json"
        return env.exists() and files.read_json(env)["status"] == "done"

    def _start(self) -> subprocess.Popen[bytes]:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        experiment = self._record.env["experiment"]
        shipped = RECORDS / self._record.name
        name = config_name(shipped, experiment)
        config = [name] if name else ["--config", str(shipped / "config.json")]
        command = ["-m", "jaxkv.cli.main", "run", experiment, *config]
        with self._folder.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command, "--out", str(self._folder)],
                stdout=log,
                stderr=log,
                start_new_session=True,  # a group that can be paused
            )

    def _finish(self, process: _Process) -> str:
        """Replaces the record; returns a line on its difference from the old one."""
        self._state_path.unlink()
        name = self._record.name
        if not self._is_done():
            log = self._folder.with_suffix(".log")
            last = files.read_text(log).strip().rpartition("\n")[2]
            return f"{name}: failed: {last or log}"
        shipped = RECORDS / name
        differing = _differing_arrays(shipped, self._folder)
        changed = _changed_verdicts(shipped, self._folder)
        env = files.read_json(self._folder / "env.json")
        env["yardstick_s"] = process.yardstick_s
        env["load_average"] = process.load_average
        env["duration_s"] -= process.paused_s
        old = self._record.env
        env["earlier"] = {
            "commit": old["commit"],
            "date": old["started_at"][:10],
            "differing_arrays": differing,
        }
        files.write_atomically(self._folder / "env.json", dumps(env))
        experiment = framework.load_experiment(env["experiment"])
        run = read_run(self._folder, experiment)
        report = render_report(experiment.question, run.config, run.env, run.parts)
        files.write_atomically(self._folder / "report.md", report)
        replace_run(shipped, self._folder)
        equal = f"{len(differing)} arrays differ" if differing else "equal arrays"
        verdicts = f"; verdicts: {'; '.join(changed)}" if changed else ""
        return f"{name}: {env['duration_s']:.0f} s, {equal}{verdicts}"


def _process_state(pid: int) -> str:
    """Returns the state letter of a process, "T" if it is paused; "" if it ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[0]


def _is_running(pid: int, process: subprocess.Popen[bytes] | None = None) -> bool:
    if process is not None:
        return process.poll() is None
    return _process_state(pid) not in ("", "Z")


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    """Returns the arrays or the rows of a result, by name."""
    if (folder / "result.npz").exists():
        with np.load(folder / "result.npz", allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    rows = [json.loads(x) for x in files.read_text(folder / "runs.jsonl").splitlines()]
    names = {name: None for row in rows for name in row}
    return {name: np.array([str(row.get(name)) for row in rows]) for name in names}


def _differing_arrays(old: Path, new: Path) -> dict[str, float | None]:
    """Returns the arrays that differ between two results.

    Returns:
      Largest relative difference by name; None for other shapes and for texts.
    """
    one = _arrays(old)
    two = _arrays(new)
    differences = dict.fromkeys(one.keys() ^ two.keys())
    for name in one.keys() & two.keys():
        before = one[name]
        after = two[name]
        if before.shape != after.shape or "U" in before.dtype.kind + after.dtype.kind:
            if not np.array_equal(before, after):
                differences[name] = None
        elif not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
            scale = np.maximum(np.abs(before), np.abs(after)).astype(float)
            with np.errstate(invalid="ignore"):  # infinite numbers that are equal
                gap = np.abs(before.astype(float) - after)
                gap /= np.where(scale > 0, scale, 1.0)
            differences[name] = float(np.nan_to_num(gap, nan=1.0).max())
    return differences


def _changed_verdicts(old: Path, new: Path) -> list[str]:
    """Returns the claims whose verdicts differ."""
    before, after = (
        {
            x["claim"]: x["verdict"]
            for x in json.loads(files.read_text(folder / "claims.json"))
        }
        for folder in (old, new)
    )
    return [
        f"{claim}: {before.get(claim, 'none')}, now {verdict}"
        for claim, verdict in after.items()
        if before.get(claim) != verdict
    ]
