"""Replays recorded hours of a cloud's requests on simulated GPUs.

Step times follow a roofline of the data sheet, a lower bound for real GPUs.

Source of the recordings: Patel et al. 2024 (Splitwise), arXiv:2311.18677.
"""

import itertools
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from experiments import lab
from experiments.harness import find_cost_model
from jaxkv import scheduling, simulation, workloads
from jaxkv.simulation import Capacity, SimulationMember, SimulationResult
from jaxkv.workloads import (
    Recording,
    normalised_latency_s,
    read_recording,
    time_per_output_token_s,
    time_to_first_token_s,
)
from scaling import shapes
from scaling.costs import PAGE_SIZE, find_device, max_kv_pages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACES = ("azure_conv", "azure_code")
DATA_VARIABLE = "JAXKV_DATA"
"""Environment variable with the folder that contains `traces/`."""

MAX_SLOTS = 256
HEAD_SIZE = 16
BUDGET = 2048
"""Token budget of a step; chunked prefill shares it with decoding."""
MAX_LENGTH = 1 << 14
"""Longest request in tokens; some exceed the context length of the models."""


def gpu_capacity(model: str, device: str, num_devices: int) -> Capacity:
    """Returns the number of pages that fit next to the weights."""
    shape = shapes.describe(model)
    return Capacity.of(
        num_pages=max_kv_pages(shape, device, num_devices),
        page_size=PAGE_SIZE,
        max_length=MAX_LENGTH,
        token_budget=BUDGET,
    )


def check_fits(model: str, device: str, num_devices: int) -> None:
    """Checks that the devices hold a model and its longest request.

    Raises:
      ValueError: they do not, or the model or the device is unknown.
    """
    pages = max_kv_pages(shapes.describe(model), device, num_devices)
    if pages * PAGE_SIZE < MAX_LENGTH:
        raise ValueError(
            f"{model} and {MAX_LENGTH:,} tokens do not fit {num_devices} x "
            f"{find_device(device).name}"
        )


class Config(lab.ConfigRecord):
    """Recordings, models and devices."""

    traces: Annotated[tuple[str, ...], lab.Choices(TRACES, minimum=1)] = TRACES
    """Names of recordings in the folder JAXKV_DATA."""
    models: tuple[str, ...] = ("llama-2-7b", "llama-2-13b")
    """Served models."""
    num_devices: lab.PositiveInts = (1, 2, 4)
    """Numbers of GPUs."""
    device: str = "a100-80gb"
    """Kind of GPU."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for name, num in self.cases:
            check_fits(name, self.device, num)

    @property
    def cases(self) -> list[tuple[str, int]]:
        """Every model on every number of GPUs."""
        return [*itertools.product(self.models, self.num_devices)]


CONFIGS = {"azure": Config()}


def find_recording(trace: str) -> Path:
    """Returns the path of a recording.

    Raises:
      ValueError: JAXKV_DATA is not set, or its folder has no such file.
    """
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        raise ValueError(
            f"{DATA_VARIABLE} names no folder: replays need its traces/{trace}.csv, "
            "and are skipped without"
        )
    path = Path(folder) / "traces" / f"{trace}.csv"
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file; {DATA_VARIABLE} names its folder"
        )
    return path


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[lab.Row]:
    """Replays each recording with every model on every number of GPUs."""
    rows: list[lab.Row] = []
    for trace in config.traces:
        recording = read_recording(find_recording(trace))
        for doubt in recording.doubts:
            warnings.warn(doubt, stacklevel=2)
        progress.show(f"{trace}: {recording.prompt.size:,} requests")
        members = [
            SimulationMember(
                recording.workload(),
                gpu_capacity(name, config.device, num),
                scheduling.fcfs(),
                find_cost_model(f"roofline:{name}:{config.device}:{num}").cost,
            )
            for name, num in config.cases
        ]
        served = simulation.simulate(
            simulation.stack(members),
            max_slots=MAX_SLOTS,
            head=HEAD_SIZE,
            progress=progress,
        )
        if progress.stopped:  # before every request was answered
            break
        rows += [
            {"panel": trace, "trace": trace, "model": name, "num_devices": num}
            | _row(served, i, recording)
            for i, (name, num) in enumerate(config.cases)
        ]
    return rows


def _row(served: SimulationResult, index: int, recording: Recording) -> lab.Row:
    arrival_s, first_s, finish_s = (
        x[index] for x in (served.arrival_s, served.first_s, served.finish_s)
    )
    output = recording.output
    waits_s = time_to_first_token_s(arrival_s, first_s)
    each_s = time_per_output_token_s(first_s, finish_s, output)
    answered = ~np.isnan(finish_s)
    # Latencies leave out rejected requests, which are counted separately.
    accepted = ~served.rejected[index]
    several = accepted & (output > 1)
    came_s = np.where(accepted, arrival_s, np.nan)
    did = served.numbers(index)
    return did | {
        "num_requests": int(arrival_s.size),
        "num_answered": int(answered.sum()),
        "num_rejected": int(served.rejected[index].sum()),
        "recorded_s": float(recording.arrival_s[-1]),
        "finished_s": float(np.nanmax(finish_s)) if answered.any() else float("nan"),
        "normalised_s": float(normalised_latency_s(came_s, finish_s, output)),
        "first_p50_s": float(workloads.percentile(waits_s, 50, is_asked=accepted)),
        "first_p99_s": float(workloads.percentile(waits_s, 99, is_asked=accepted)),
        "each_p50_s": float(workloads.percentile(each_s, 50, is_asked=several)),
        "each_p99_s": float(workloads.percentile(each_s, 99, is_asked=several)),
        "busy_share": did["busy_s"] / float(served.end_s[index]),
    }


def metrics(result: list[lab.Row]) -> dict[str, object]:
    """Returns the replays under the keys of `figures.metrics`."""
    return {"capacities": [], "rows": result}


def summary(result: list[lab.Row]) -> list[lab.ReportPart]:
    """Returns a table of the replays."""
    columns = {
        "recording": "trace",
        "model": "model",
        "GPUs": "num_devices",
        "answered": "num_answered",
        "of": "num_requests",
        "first token": "first_p50_s",
        "first, 99 %": "first_p99_s",
        "each token": "each_p50_s",
        "each, 99 %": "each_p99_s",
        "batch": "batch",
        "busy": "busy_share",
        "preempted": "num_preempted",
    }
    note = (
        "Roofline of the data sheet: no real GPU is faster. GPUs share the work evenly "
        "without idle time. Medians and 99th percentiles."
    )
    title = "recorded hours, all requests"
    return [lab.row_sheet(title, result, columns, note)]


def plot(ax: "Axes", result: list[lab.Row]) -> None:
    """Draws the P99 time to first token of every replay."""
    kinds = {"conv": "chat", "code": "code"}
    replays = itertools.groupby(result, lambda row: (row["trace"], row["model"]))
    for (trace, model), rows in replays:
        points = [(row["num_devices"], row["first_p99_s"]) for row in rows]
        kind = trace[6:]
        size = model.removeprefix("llama-2-")
        color = lab.BLUE if kind == "code" else lab.ORANGE
        is_small = size == "7b"
        look = {"linestyle": "-" if is_small else "--", "marker": "os"[not is_small]}
        label = f"{kinds.get(kind, kind)}, {size.upper()}"
        lab.draw_curve(ax, *zip(*points, strict=True), color, label, **look)
    lab.use_powers_of_two(ax)
    title = "Llama-2 on A100s: first token by GPUs"
    slow = [x for x in result if x["first_p99_s"] > 1]
    if slow:
        worst = max(slow, key=lambda row: row["first_p99_s"])
        name = kinds.get(worst["trace"][6:], worst["trace"])
        title = f"Recorded {name} on {worst['num_devices']} A100: "
        size = worst["model"].removeprefix("llama-2-").upper()
        title += f"first token of Llama-2-{size} after {worst['first_p99_s']:,.0f} s"
    y = "first token, 99th percentile [s]"
    lab.set_labels(ax, title, "A100 [GPUs]", y, yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.legend()


STUDY = lab.Study(
    CONFIGS, list, run, plot, summary=summary, metrics=metrics, switch=("traces", True)
)
