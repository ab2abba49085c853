"""How fast are the kernels, and how near to what the device can do at all?

Every kernel answers every shape beside its peers, is held against float64 first, and
its time against that of a device that moves the bytes and does the operations at the
rates it was seen to reach in the same run. What is wrong is not timed.

A time is that of a layer. Ours has in it a layer's share of the plan, which is made
once a step; the plans of peers are made outside of their times, and stand beside them.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from experiments.bench.kernels import drawing, grouped, runs, sheets
from experiments.bench.kernels.budget import Budget
from experiments.bench.kernels.calls import MAX_ERROR, Implementation, Run
from experiments.bench.kernels.peers.peers import start
from experiments.framework import Part
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from pallas_kernels import devices
from pallas_kernels.bench import (
    Ceilings,
    GroupedSpec,
    Spec,
    grouped_specs,
    problems,
    specs,
)
from pallas_kernels.bench import timing as bench_timing
from pallas_kernels.bench.timing import (
    Timing,
    measure_ceilings,
    measure_empty,
    num_turns,
)

PANELS = (1, 2)
NUM_LAYERS = 32
"""Layers that share a plan, those of a model of 7 or 8 thousand million parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which shapes are measured, and how long."""

    shapes: Literal["auto", "tiny", "small", "quick", "real", "grid"] = "auto"
    """Sets of `specs` and `grouped_specs`; auto takes real on a GPU, else small."""
    quick: bool = False
    """Fewer shapes and calls, and less than half of the seconds."""
    only: str = ""
    """Takes only the shapes whose name has this in it."""
    num_calls: int = 30
    """Calls that are timed of each; fewer where they are slow."""
    max_s: float = 480.0
    """Seconds after which nothing more is begun; the shapes of quick come first."""
    peer_python: Path | None = None
    """A Python that has other frameworks: their attention is timed, too, in processes
    of their own. None means this one on a GPU, if it has torch."""

    def __post_init__(self) -> None:
        """Refuses what cannot be measured."""
        validation.at_least(self, "num_calls", low=2)
        validation.above(self, "max_s")


CONFIGS = {
    "real": Config(),
    "quick": Config(quick=True),
    "grid": Config(shapes="grid", max_s=3600.0),
    "smoke": Config(shapes="tiny", num_calls=2),
}


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Measures the ceilings, then shape after shape.

    Returns:
      First what was measured of the device, then a row for each shape and
      implementation; `note` says why one has no time.
    """
    budget = Budget(0.4 * config.max_s if config.quick else config.max_s)
    _leave_room()
    target = devices.current()
    chosen = _choose(config, target.platform)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        python = config.peer_python
        if target.platform == "gpu" and importlib.util.find_spec("torch"):
            python = python or Path(sys.executable)
        num_calls = max(2, config.num_calls // 3) if config.quick else config.num_calls
        progress.show("starting the peers")
        found = start(python, stack, budget, num_calls)
        others, versions, absent = found
        progress.show("measuring what the device can do")
        ceilings = _measure_ceilings(config, target.platform)
        measure = _Measurement(target.kind, ceilings, budget, num_calls)
        for spec in progress.track(chosen, "shapes", "shapes"):
            progress.show(spec.name)
            rows += measure(spec, [*_here(spec), *(others if _attends(spec) else [])])
            if _attends(spec):
                rows += [_row(spec, x, True) | {"note": absent[x]} for x in absent]
            gc.collect()  # of arrays that a failure left behind
    head: dict[str, Any] = {
        "device": target.kind,
        "ceilings": ceilings._asdict(),
        "peers": versions,
        "num_layers": NUM_LAYERS,
        "max_s": budget.seconds,
    }
    return [head, *rows]


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws the roofline, and how near each call comes to it."""
    drawing.plot(axes, result)


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
    return sheets.sheets(result)


def _leave_room() -> None:
    """Lets the peers have some of the GPU's memory, if jax has not taken it yet."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")


def _attends(spec: Spec | GroupedSpec) -> bool:
    """Whether it is attention, which is all that the peers elsewhere do."""
    return spec.kind not in ("copy", "grouped")


def _here(spec: Spec | GroupedSpec) -> list[Implementation]:
    """All that do the work of a spec in this process, ours first."""
    if isinstance(spec, GroupedSpec):
        return grouped.of_products()
    return runs.of(spec)


def _choose(config: Config, platform: str) -> list[Spec | GroupedSpec]:
    """Takes the shapes of a set, those that tell most before the others."""
    name = config.shapes
    if name == "auto":
        name = "small" if platform != "gpu" else "quick" if config.quick else "real"
    known = (*specs.SETS[name], *grouped_specs.SETS[name])
    chosen = [spec for spec in known if config.only in spec.name]
    if not chosen:
        raise ValueError(f"{config.only=} is in no name of the set {name!r}")
    first = (*specs.SETS["quick"], *grouped_specs.SETS["quick"])
    return sorted(chosen, key=lambda spec: spec not in first)


def _measure_ceilings(config: Config, platform: str) -> Ceilings:
    sizes: dict[str, Any]
    if config.shapes == "tiny":
        sizes = {"num_elements": 2**16, "width": 64, "dtype": "float32"}
    elif platform == "gpu":
        sizes = {"num_elements": 2**29, "width": 8192, "dtype": "bfloat16"}
    else:
        sizes = {"num_elements": 2**25, "width": 2048, "dtype": "float32"}
    return measure_ceilings(**sizes, num_calls=min(10, config.num_calls))


class _Measurement:
    """Measures implementations on a shape, as long as there is time.

    Args:
      kind: of device.
      ceilings: of it.
      budget: of time.
      num_calls: calls that are timed.
    """

    def __init__(self, kind: str, ceilings: Ceilings, budget: Budget, num_calls: int):
        self._kind, self._ceilings = kind, ceilings
        self._budget, self._num_calls = budget, num_calls
        self._empty_s = functools.cache(self._measure_empty)

    def __call__(
        self, spec: Spec | GroupedSpec, everyone: list[Implementation]
    ) -> list[dict[str, Any]]:
        """Gives the rows of all of them, with the ratio to the best peer."""
        problem = None
        rows = []
        for implementation in everyone:
            row = _row(spec, implementation.name, implementation.is_peer)
            share = implementation.name if implementation.has_share else ""
            try:
                if why_not := self._budget.why_not(share):
                    raise ValueError(why_not)
                problem = problem or self._make(spec)
                if share:
                    with self._budget.spend(share):
                        row |= self._time(spec, implementation.prepare(problem))
                else:
                    row |= self._time(spec, implementation.prepare(problem))
            except Exception as error:  # of a peer's, of a compiler's: the others go on
                row["note"] = _first_line(error)
            rows.append(row)
        peers = [row["seconds"] for row in rows if row["is_peer"] and row["seconds"]]
        for row in rows:
            if peers and row["seconds"]:
                row["ratio"] = min(peers) / row["seconds"]
        return rows

    def _make(self, spec: Spec | GroupedSpec) -> Any:
        turns = num_turns(spec.bytes, self._kind)
        if isinstance(spec, GroupedSpec):
            return grouped_specs.make(spec, num_turns=turns)
        if spec.kind == "copy":
            return problems.make_copy(spec)
        return problems.make(spec, num_turns=turns)

    def _time(self, spec: Spec | GroupedSpec, run: Run) -> dict[str, Any]:
        """Checks a run and times it: what its row then holds."""
        error = run.error()
        if not error <= MAX_ERROR[spec.dtype]:
            raise ValueError(f"its answer is wrong: error={error:.2g}")
        timing = run.measure() if run.measure else self._clock(run.call)
        plan_s, share_s = run.plan_s, 0.0
        if run.plan:
            plan_s = self._clock(run.plan).seconds
            share_s = plan_s / NUM_LAYERS
        seconds = timing.seconds + share_s
        floor_s = self._ceilings.floor_s(spec.bytes, spec.flops)
        fixed_s = self._empty_s(timing.num_kernels or 1)
        return {
            **timing._asdict(),
            "seconds": seconds,
            "call_s": timing.seconds,
            "plan_s": plan_s,
            "plan_per_layer_s": None if plan_s is None else plan_s / NUM_LAYERS,
            "merge_s": self._clock(run.merge).seconds if run.merge else None,
            "t0_s": fixed_s,
            "target_s": self._ceilings.target_s(spec.bytes, spec.flops, fixed_s),
            "fraction": floor_s / seconds,
            "excess_s": seconds - floor_s,
            "error": error,
            "how": run.how,
        }

    def _clock(self, call: Callable[[int], Any]) -> Timing:
        return bench_timing.measure(call, num_calls=self._num_calls)

    def _measure_empty(self, num_kernels: int) -> float:
        if num_kernels == 1:
            return self._ceilings.empty_call_s
        empty = measure_empty(num_kernels=num_kernels)
        return empty.seconds


def _row(spec: Spec | GroupedSpec, name: str, is_peer: bool) -> dict[str, Any]:
    """A row without any measurement."""
    known = {"bytes": spec.bytes, "flops": spec.flops, "is_peer": is_peer}
    unknown = (
        *("seconds", "error", "fraction", "ratio", "excess_s", "target_s"),
        *("call_s", "plan_s", "plan_per_layer_s", "merge_s", "t0_s"),
        *("spread", "num_kernels", "longest_s"),
    )
    words = {"clock": "", "how": "", "note": ""}
    empty = dict.fromkeys(unknown)
    return {"spec": spec.name, "implementation": name, **known, **empty, **words}


def _first_line(error: Exception) -> str:
    said = str(error).strip().split("\n")[0][:200]
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
