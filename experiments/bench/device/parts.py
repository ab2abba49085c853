"""The parts of what a GPU is asked: their pieces, and the commands that answer them."""

import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.framework import config_json, registry

ROOT = Path(__file__).parents[3]

KILLED = "killed"
"""How a note begins where a process was ended for its time."""
LEAST_S = {
    "correctness": 20.0,
    "kernels": 60.0,
    "timeline": 60.0,
    "decode": 120.0,
    "train": 60.0,
    "isoflop": 60.0,
}
"""Seconds under which a part is not begun on a GPU: it would have to be killed."""

now_s = time.monotonic
"""The clock; tests put another one in its place."""


class Piece(NamedTuple):
    """What became of a piece; without `found` the note says why there is nothing."""

    name: str
    found: dict[str, Any] | None = None
    note: str = ""
    goes_on: bool = False


class Part(NamedTuple):
    """One of the things to ask.

    Attributes:
      name: of the part.
      share: of the time that is left, against the shares of the parts behind it.
      names: its pieces, the most telling first.
      answer: answers some of them: their names, a folder that stays, seconds after
        which nothing more is begun, and seconds after which it is killed.
      least_s: seconds under which it is not begun.
      at_once: pieces that one process is given.
    """

    name: str
    share: float
    names: tuple[str, ...]
    answer: Callable[[Sequence[str], Path, float, float], list[Piece]]
    least_s: float
    at_once: int = 1


def of(size: str) -> tuple[Part, ...]:
    """All parts, in their order; size is "gpu", or "tiny" for a trial of it all."""
    from experiments.bench.device import checks, timeline
    from pallas_kernels.bench import sets

    is_real = size == "gpu"
    kernels = tuple(x.name for x in _ordered(sets.SETS, "real" if is_real else "tiny"))
    batches, widths = ((1, 32, 128), (128, 256, 512, 1024)) if is_real else ((1,), (8,))
    decode = tuple(f"batch-{x}" for x in batches)
    train = tuple(f"width-{x}" for x in widths)

    def worker(part: str) -> Callable[..., list[Piece]]:
        return lambda *args: _by_worker(part, size, *args)

    def bench(name: str, field: str) -> Callable[..., list[Piece]]:
        return lambda *args: _by_command(name, size, field, *args)

    least_s = LEAST_S if is_real else dict.fromkeys(LEAST_S, 5.0)
    answers = {
        "correctness": (0.25, tuple(checks.names(size)), worker("correctness"), 99),
        "kernels": (0.3, kernels, lambda *args: _kernels(size, *args), 8),
        "timeline": (0.15, timeline.NAMES, worker("timeline"), 2),
        "decode": (0.3, decode, bench("bench_decode", "batch"), 1),
        "train": (0.15, train, bench("bench_train", "width"), 1),
        "isoflop": (0.5, ("isoflop",), lambda *args: _isoflop(size, *args), 1),
    }
    return tuple(
        Part(name, share, names, answer, least_s[name], at_once)
        for name, (share, names, answer, at_once) in answers.items()
    )


def _ordered(known: Any, name: str) -> list[Any]:
    return sorted(known[name], key=lambda spec: spec not in known["quick"])


def execute(command: Sequence[str], kill_s: float) -> tuple[int | None, str, str]:
    """Runs a command of the project; its status, None if it was killed, and output."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with what it starts, it is ended together
    )
    try:
        out, err = process.communicate(timeout=kill_s)
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
        return None, out, err
    except BaseException:
        _end(process)
        raise
    return process.returncode, out, err


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def why(status: int | None, err: str) -> str:
    """Why a command gave nothing, in a line."""
    if status is None:
        return f"{KILLED}: it did not end in its time"
    said = [line for line in err.strip().split("\n") if line.strip()]
    return f"status {status}: {said[-1][:300] if said else 'it said nothing'}"


def _by_worker(
    part: str,
    size: str,
    names: Sequence[str],
    folder: Path,
    soft_s: float,
    kill_s: float,
) -> list[Piece]:
    """Answers by `worker`; the piece in which it broke down is told as such."""
    file = folder / f".{part}.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.bench.device.worker", part, size]
    command += [str(file), f"{soft_s:.3f}", *names]
    status, _, err = execute(command, kill_s)
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return read_lines(lines, names, why(status, err) if status != 0 else "")


def read_lines(lines: Sequence[str], names: Sequence[str], broke: str) -> list[Piece]:
    """What a worker said of pieces; `broke` says how it ended, if not well."""
    found, begun = [], ""
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:  # the half of a line that it was killed in
            continue
        begun = said.get("begins", "")
        if "name" in said:
            found.append(Piece(said["name"], said.get("found"), said.get("note", "")))
    if broke:
        begun = begun or next(
            (x for x in names if x not in {y.name for y in found}), ""
        )
        if begun:
            found.append(Piece(begun, note=broke))
    return found


def _run(
    name: str,
    config: Any,
    folder: Path,
    soft_s: float,
    kill_s: float,
    out: Path | None,
) -> tuple[int | None, dict[str, Any] | None, str]:
    """Runs an experiment by the command line; status, metrics, or why none."""
    file = folder / ".config.json"
    file.write_text(config_json.config_dumps(config), "utf-8")
    target = out or folder / ".run"
    command = [sys.executable, "-m", "experiments.cli.main", "run", name, "--config"]
    command += [str(file), "--out", str(target), "--max-seconds", f"{soft_s:.3f}"]
    status, said, err = execute([*command, "--json"], kill_s)
    try:
        document = json.loads(said) if status in (0, 75, 130) else None
    except ValueError:
        document = None
    metrics = None if document is None else document["metrics"]
    return status, metrics, "" if metrics is not None else why(status, err)


def _config(name: str, size: str, changes: dict[str, Any]) -> Any:
    configs = registry.load(name).configs
    real = "gpu" if "gpu" in configs else "real"
    return dataclasses.replace(configs[real if size == "gpu" else "smoke"], **changes)


def _peers(size: str) -> dict[str, Any]:
    """On a GPU's machine the peers are in the same Python, where they are."""
    has_torch = size == "gpu" and importlib.util.find_spec("torch") is not None
    return {"peer_python": Path(sys.executable)} if has_torch else {}


def _by_command(
    name: str,
    size: str,
    field: str,
    names: Sequence[str],
    folder: Path,
    soft_s: float,
    kill_s: float,
) -> list[Piece]:
    """One piece by an experiment, its number in a field; in part it does not count."""
    [piece] = names
    changes: dict[str, Any] = {field: (int(piece.rpartition("-")[2]),)}
    changes |= _peers(size) if name == "bench_train" else {}
    config = _config(name, size, changes)
    _, metrics, note = _run(name, config, folder, kill_s, kill_s, None)
    if metrics is not None and not metrics["rows"]:
        metrics, note = None, f"{KILLED}: it did not end in its time"
    return [Piece(piece, metrics, note)]


def _kernels(
    size: str, names: Sequence[str], folder: Path, soft_s: float, kill_s: float
) -> list[Piece]:
    """Several shapes by one run of `bench kernels`, which measures ceilings once."""
    changes: dict[str, Any] = {"these": tuple(names), "max_s": max(1.0, soft_s)}
    if size == "gpu":
        changes["shapes"] = "real"
    config = _config("bench_kernels", size, changes)
    status, metrics, note = _run("bench_kernels", config, folder, soft_s, kill_s, None)
    if metrics is None:
        return [Piece(names[0], note=note)]
    head = {x: metrics[x] for x in ("device", "ceilings", "peers")}
    found = []
    for name in names:
        rows, absent = (
            [x for x in metrics[key] if x["spec"] == name] for key in ("rows", "absent")
        )
        skipped = any(x["note"].startswith("skipped: the") for x in absent)
        if rows and not (skipped and status == 75):
            found.append(Piece(name, head | {"rows": rows, "absent": absent}))
    return found


def _isoflop(
    size: str, names: Sequence[str], folder: Path, soft_s: float, kill_s: float
) -> list[Piece]:
    """A sweep that goes on from call to call, in a folder of its own."""
    changes = {"folder": str(folder / "isoflop"), "keep_models": False}
    config = _config("isoflop", size, changes)
    out = folder / "isoflop-run"
    status, metrics, note = _run("isoflop", config, folder, soft_s, kill_s, out)
    goes_on = status == 75 or (status is None and math.isfinite(soft_s))
    return [Piece(names[0], None if goes_on else metrics, note, goes_on)]
