"""How fast are the kernels, and how near to what the device can do at all?

Every kernel answers every shape beside its peers, is held against float64 first, and
its time against that of a device that moves the bytes and does the operations at the
rates it was seen to reach in the same run. What is wrong is not timed.
"""

import contextlib
import dataclasses
import gc
import importlib.util
import sys
from pathlib import Path
from typing import Any, Literal

from experiments import kernel_drawing, kernel_peers, kernel_runs, units
from experiments.kernel_runs import Implementation
from experiments.progress import QUIET, Progress
from experiments.reporting import Part, Sheet
from pallas_kernels import benchmarking, problems, specs, targets
from pallas_kernels.benchmarking import Ceilings
from pallas_kernels.specs import Spec

PANELS = (1, 2)
MAX_ERROR = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest error, by type, with which an answer counts as one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which shapes are measured, and how long."""

    shapes: Literal["auto", "tiny", "small", "quick", "real", "grid"] = "auto"
    """A set of `pallas_kernels.specs`; auto takes real on a GPU, else small."""
    quick: bool = False
    """Fewer shapes and calls."""
    only: str = ""
    """Takes only the shapes whose name has this in it."""
    num_calls: int = 30
    """Calls that are timed of each; fewer where they are slow."""
    peer_python: Path | None = None
    """A Python that has torch: its attention is timed, too, in a process of its own.
    None means this one on a GPU, if it has it."""

    def __post_init__(self) -> None:
        """Refuses what cannot be measured."""
        if self.num_calls < 2:
            raise ValueError(f"{self.num_calls=} must be at least 2")


CONFIGS = {
    "real": Config(),
    "quick": Config(quick=True),
    "grid": Config(shapes="grid"),
    "smoke": Config(shapes="tiny", num_calls=2),
}


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Measures the ceilings, then shape after shape.

    Returns:
      First what was measured of the device, then a row for each shape and
      implementation; `note` says why one has no time.
    """
    target = targets.current()
    chosen = _choose(config, target.platform)
    progress.show("measuring what the device can do")
    ceilings = _measure_ceilings(config, target.platform)
    head: dict[str, Any] = {"device": target.kind, "ceilings": ceilings._asdict()}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        python = config.peer_python
        if target.platform == "gpu" and importlib.util.find_spec("torch"):
            python = python or Path(sys.executable)
        others, head["peers"], absent = kernel_peers.start(python, stack)
        for spec in progress.track(chosen, "shapes", "shapes"):
            progress.show(spec.name)
            rows += _measure(spec, config, target, ceilings, others)
            if spec.kind != "copy":
                rows += [_row(spec, x, True) | {"note": absent[x]} for x in absent]
            gc.collect()  # of arrays that a failure left behind
    return [head, *rows]


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws the roofline, and how near each call comes to it."""
    kernel_drawing.plot(axes, result)


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives the device, its ceilings and the rows that have a time; apart, the rest."""
    head, *rows = result
    timed = [row for row in rows if row["seconds"] is not None]
    absent = [row for row in rows if row["seconds"] is None]
    names = ("spec", "implementation", "note")
    return {
        **head,
        "rows": [{k: v for k, v in row.items() if k != "note"} for row in timed],
        "absent": [{name: row[name] for name in names} for row in absent],
    }


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Tells the ceilings, then the times of everyone side by side."""
    head, *rows = result
    ceilings = Ceilings(**head["ceilings"])
    lines = [
        ("copy, read and written", units.size(ceilings.copy_bytes_per_s) + "/s"),
        ("sum, read", units.size(ceilings.read_bytes_per_s) + "/s"),
        ("matrix product", units.flops(ceilings.flops_per_s) + "/s"),
        ("empty call", units.seconds(ceilings.empty_call_s)),
    ]
    note = _CLOCKS[ceilings.clock]
    parts: list[Part] = [Sheet(f"ceilings of {head['device']}", ("", ""), lines, note)]
    timed = [row for row in rows if row["seconds"] is not None]
    heads = (
        *("implementation", "time", "target", "of the floor", "best peer / it"),
        "error",
    )
    for name in dict.fromkeys(row["spec"] for row in timed):
        mine = [row for row in timed if row["spec"] == name]
        work = units.size(mine[0]["bytes"]), units.flops(mine[0]["flops"])
        cells = [
            (
                row["implementation"],
                units.seconds(row["seconds"]),
                units.seconds(row["target_s"]),
                units.share(row["fraction"]),
                "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
                f"{row['error']:.1e}",
            )
            for row in mine
        ]
        parts.append(Sheet(f"{name}: {', '.join(work)}", heads, cells))
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["seconds"] is None:
            reasons.setdefault((row["implementation"], row["note"]), []).append(
                row["spec"]
            )
    if reasons:
        lines = [
            (name, f"{len(where)} of {len({row['spec'] for row in rows})}", why)
            for (name, why), where in reasons.items()
        ]
        parts.append(Sheet("not timed", ("implementation", "shapes", "why"), lines))
    return parts


_CLOCKS = {
    "cupti": "Times are those of the kernels alone (CUPTI), caches cold.",
    "wall": "Times are those of calls that are waited for, by the clock on the wall.",
    "queue": "Times are those of calls waited for together: no CUPTI was found.",
}


def _choose(config: Config, platform: str) -> list[Spec]:
    name = config.shapes
    if name == "auto":
        name = "small" if platform != "gpu" else "quick" if config.quick else "real"
    chosen = [spec for spec in specs.SETS[name] if config.only in spec.name]
    if not chosen:
        raise ValueError(f"{config.only=} is in no name of the set {name!r}")
    return chosen


def _measure_ceilings(config: Config, platform: str) -> Ceilings:
    sizes: dict[str, Any]
    if config.shapes == "tiny":
        sizes = {"num_elements": 2**16, "width": 64, "dtype": "float32"}
    elif platform == "gpu":
        sizes = {"num_elements": 2**29, "width": 8192, "dtype": "bfloat16"}
    else:
        sizes = {"num_elements": 2**25, "width": 2048, "dtype": "float32"}
    return benchmarking.measure_ceilings(**sizes, num_calls=min(10, config.num_calls))


def _measure(
    spec: Spec,
    config: Config,
    target: targets.Target,
    ceilings: Ceilings,
    others: list[Implementation],
) -> list[dict[str, Any]]:
    """Rows of all implementations on a shape, with the ratio to the best peer."""
    if spec.kind == "copy":
        everyone = kernel_runs.of_copies()
        problem: Any = problems.make_copy(spec)
    else:
        everyone = [*kernel_runs.of_attention(), *others]
        turns = benchmarking.num_turns(spec.bytes, target.kind)
        problem = problems.make(spec, num_turns=turns)
    num_calls = max(2, config.num_calls // 3) if config.quick else config.num_calls
    rows = []
    for implementation in everyone:
        row = _row(spec, implementation.name, implementation.is_peer)
        try:
            run = implementation.prepare(problem)
            row["error"] = run.error()
            if not row["error"] <= MAX_ERROR[spec.dtype]:
                raise ValueError(f"its answer is wrong: error={row['error']:.2g}")
            if run.measure is None:
                timing = benchmarking.measure(run.call, num_calls=num_calls)
            else:
                timing = run.measure(num_calls)
            row |= timing._asdict()
            floor_s = ceilings.floor_s(spec.bytes, spec.flops)
            row["fraction"] = floor_s / timing.seconds
            row["excess_s"] = timing.seconds - floor_s
            row["target_s"] = ceilings.target_s(
                spec.bytes, spec.flops, timing.num_kernels or 1
            )
        except Exception as error:  # of a peer's, of a compiler's: the others go on
            row["note"] = _first_line(error)
        rows.append(row)
        run = None  # and its arrays
    peers = [row["seconds"] for row in rows if row["is_peer"] and row["seconds"]]
    for row in rows:
        if peers and row["seconds"]:
            row["ratio"] = min(peers) / row["seconds"]
    return rows


def _row(spec: Spec, name: str, is_peer: bool) -> dict[str, Any]:
    """A row without any measurement."""
    known = {"bytes": spec.bytes, "flops": spec.flops, "is_peer": is_peer}
    unknown = (
        *("seconds", "error", "fraction", "ratio", "excess_s", "target_s"),
        *("spread", "num_kernels"),
    )
    words = {"clock": "", "note": ""}
    empty = dict.fromkeys(unknown)
    return {"spec": spec.name, "implementation": name, **known, **empty, **words}


def _first_line(error: Exception) -> str:
    said = str(error).strip().split("\n")[0][:200]
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
