"""How fast are the kernels, compared with peers and with the limits of the device?

Every kernel and peer runs on every shape. Its result is first compared with float64;
incorrect results are not timed. Its time is compared with that of a device that moves
the bytes and computes the operations at the rates measured in the same run.

A time is that of one layer. Times of this project's kernels include a layer's share of
the plan, which is made once per step. Plans of peers are made outside their times, and
are listed separately.
"""

import contextlib
import functools
import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from experiments import lab
from experiments.bench.kernels import peer_frameworks
from experiments.bench.kernels.peer_frameworks import TimeBudget
from experiments.bench.kernels.report import plot, summary
from experiments.harness import (
    MAX_ERROR,
    Implementation,
    KernelRun,
    PeerProcess,
    implementations_of,
    start_peers,
)
from pallas_kernels import bench, devices
from pallas_kernels.bench import (
    SETS,
    Ceilings,
    GroupedSpec,
    Spec,
    make_problem,
    measure_ceilings,
    measure_empty,
    num_turns,
)

UNKNOWN_COLUMNS = (
    "seconds",
    "error",
    "fraction",
    "ratio",
    "excess_s",
    "target_s",
    "call_s",
)
UNKNOWN_COLUMNS += ("plan_s", "plan_per_layer_s", "merge_s", "t0_s")
UNKNOWN_COLUMNS += ("spread", "num_kernels", "longest_s")
"""Fields of a row that are None before the measurement."""
NUM_LAYERS = 32
"""Layers that share a plan, as in models of 7 or 8 billion parameters."""


class Config(lab.ConfigRecord):
    """Shapes and time limits."""

    shapes: Literal["auto", "tiny", "small", "quick", "real", "grid"] = "auto"
    """Set of shapes in `sets`; auto takes real on a GPU, else small."""
    quick: bool = False
    """Fewer shapes and calls, and less than half of the time."""
    only: str = ""
    """Substring of the names of selected shapes."""
    these: tuple[str, ...] = ()
    """Names of selected shapes; empty for all."""
    num_calls: Annotated[int, lab.Range(2)] = 30
    """Timed calls per implementation; fewer if they are slow."""
    max_s: lab.PositiveFloat = 480.0
    """Seconds after which no measurement starts; the shapes of quick come first."""
    peer_python: Path | None = None
    """Python interpreter with other frameworks, whose attention is timed in separate
    processes. None means this interpreter on a GPU, if it has torch."""


CONFIGS = {
    "real": Config(),
    "quick": Config(quick=True),
    "grid": Config(shapes="grid", max_s=3600.0),
    "smoke": Config(shapes="tiny", num_calls=2),
}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[lab.Row]:
    """Measures the ceilings of the device, then all shapes.

    Returns:
      First the measurements of the device, then a row for each shape and
      implementation; `note` has the reason for a missing time.
    """
    budget = TimeBudget(0.4 * config.max_s if config.quick else config.max_s)
    # Leaves GPU memory for the peers, if jax has not allocated it yet.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    target = devices.current_target()
    chosen = _choose(config, target.platform)
    rows: list[lab.Row] = []
    with contextlib.ExitStack() as stack:
        python = config.peer_python
        if target.platform == "gpu" and importlib.util.find_spec("torch"):
            python = python or Path(sys.executable)
        num_calls = max(2, config.num_calls // 3) if config.quick else config.num_calls
        progress.show("starting the peers")
        peers, absent = start_peers(stack, PeerProcess, python, peer_frameworks.PEERS)
        peer_implementations = [
            peer_frameworks.wrap_peer(x, budget, num_calls) for x in peers
        ]
        progress.show("measuring the ceilings of the device")
        sizes = (2**29, 8192, "bfloat16"), (2**25, 2048, "float32")
        num, width, dtype = sizes[target.platform != "gpu"]
        if config.shapes == "tiny":
            num = 2**16
            width = 64
            dtype = "float32"
        calls = min(10, config.num_calls)
        ceilings = measure_ceilings(
            num_elements=num, width=width, dtype=dtype, num_calls=calls
        )
        measurement = _Measurement(target.kind, ceilings, budget, num_calls)
        for spec in progress.track(chosen, "shapes", "shapes"):
            progress.show(spec.name)
            if spec.kind in ("copy", "grouped"):  # no peers in other frameworks
                rows += measurement.rows(spec, implementations_of(spec))
            else:
                rows += measurement.rows(
                    spec, [*implementations_of(spec), *peer_implementations]
                )
                rows += [_row(spec, x, True) | {"note": absent[x]} for x in absent]
            gc.collect()  # frees arrays of failed implementations
    head: dict[str, object] = {
        "device": target.kind,
        "ceilings": ceilings._asdict(),
        "peers": {peer.name: peer.version for peer in peers},
        "num_layers": NUM_LAYERS,
        "max_s": budget.seconds,
    }
    return [head, *rows]


def metrics(result: list[lab.Row]) -> dict[str, object]:
    """Returns the device, its ceilings, timed rows, and rows without a time."""
    head, *rows = result
    timed = [row for row in rows if row["seconds"] is not None]
    absent = [row for row in rows if row["seconds"] is None]
    names = ("spec", "implementation", "note")
    return {
        **head,
        "rows": [{k: v for k, v in row.items() if k != "note"} for row in timed],
        "absent": [{name: row[name] for name in names} for row in absent],
    }


def _choose(config: Config, platform: str) -> list[Spec | GroupedSpec]:
    """Returns the shapes of a set, the most informative ones first."""
    name = config.shapes
    if name == "auto":
        name = "small" if platform != "gpu" else "quick" if config.quick else "real"
    chosen = [spec for spec in SETS[name] if config.only in spec.name]
    if config.these:
        spec_by_name = {spec.name: spec for spec in chosen}
        if unknown := [x for x in config.these if x not in spec_by_name]:
            raise ValueError(f"{config.these=}: {unknown} are not in the set {name!r}")
        return [spec_by_name[x] for x in config.these]
    if not chosen:
        raise ValueError(f"{config.only=} is in no name of the set {name!r}")
    return sorted(chosen, key=lambda spec: spec not in SETS["quick"])


class _Measurement:
    """Measures implementations on shapes within a time budget.

    Args:
      kind: kind of device.
      ceilings: ceilings of the device.
      budget: time budget.
      num_calls: number of timed calls.
    """

    def __init__(
        self, kind: str, ceilings: Ceilings, budget: TimeBudget, num_calls: int
    ):
        self.kind = kind
        self.ceilings = ceilings
        self.budget = budget
        self.clock = functools.partial(bench.measure, num_calls=num_calls)
        self.empty_s = {1: ceilings.empty_call_s}

    def rows(
        self, spec: Spec | GroupedSpec, implementations: list[Implementation]
    ) -> list[lab.Row]:
        """Returns the rows of all implementations, with the ratio to the best peer."""
        problem = None
        rows = []
        for name, is_peer, prepare, share in implementations:
            row = _row(spec, name, is_peer)
            try:
                with self.budget.spend(name, share):
                    turns = num_turns(spec.bytes, self.kind)
                    problem = problem or make_problem(spec, num_turns=turns)
                    row |= self._time(spec, prepare(problem))
            except Exception as error:  # of any kind: the next implementations run
                message = str(error).strip().split("\n")[0][:200]
                refused = isinstance(error, ValueError)
                row["note"] = (
                    message if refused else f"{type(error).__name__}: {message}"
                )
            rows.append(row)
        peers = [row["seconds"] for row in rows if row["is_peer"] and row["seconds"]]
        for row in rows:
            if peers and row["seconds"]:
                row["ratio"] = min(peers) / row["seconds"]
        return rows

    def _time(self, spec: Spec | GroupedSpec, run: KernelRun) -> dict[str, object]:
        """Checks and times a run; returns the fields of its row."""
        error = run.error()
        if not error <= MAX_ERROR[spec.dtype]:
            raise ValueError(f"incorrect result: error={error:.2g}")
        took = run.measure() if run.measure else self.clock(run.call)
        plan_s = self.clock(run.plan).seconds if run.plan else run.plan_s
        per_layer_s = None if plan_s is None else plan_s / NUM_LAYERS
        # The plan of a peer is not part of its time.
        seconds = took.seconds + (per_layer_s or 0.0 if run.plan else 0.0)
        floor_s = self.ceilings.floor_s(spec.bytes, spec.flops)
        num = took.num_kernels or 1
        if num not in self.empty_s:
            self.empty_s[num] = measure_empty(num_kernels=num).seconds
        return {
            **took._asdict(),
            "seconds": seconds,
            "call_s": took.seconds,
            "plan_s": plan_s,
            "plan_per_layer_s": per_layer_s,
            "merge_s": self.clock(run.merge).seconds if run.merge else None,
            "t0_s": self.empty_s[num],
            "target_s": self.ceilings.target_s(
                spec.bytes, spec.flops, self.empty_s[num]
            ),
            "fraction": floor_s / seconds,
            "excess_s": seconds - floor_s,
            "error": error,
            "how": run.how,
        }


def _row(spec: Spec | GroupedSpec, name: str, is_peer: bool) -> dict[str, Any]:
    """Returns a row without measurements."""
    return {
        "spec": spec.name,
        "implementation": name,
        "bytes": spec.bytes,
        "flops": spec.flops,
        "is_peer": is_peer,
        **dict.fromkeys(UNKNOWN_COLUMNS),
        **dict.fromkeys(("clock", "how", "note"), ""),
    }


STUDY = lab.Study(
    CONFIGS,
    list,
    run,
    plot,
    summary=summary,
    metrics=metrics,
    panels=lab.Panels(2, 1, 3.8),
)
