"""Recorded hours of a cloud's requests, replayed whole on simulated GPUs.

The step's time is the roofline of the data sheet: a bound that real GPUs stay below.

Source of the recordings: Patel et al. 2024 (Splitwise), arXiv:2311.18677.
"""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from experiments.framework import Part, report
from experiments.harness import cost_models, named_costs
from experiments.plotting import style, systems
from experiments.serving.latency_vs_rate.runs import Row
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, SimulationMember, SimulationResult, driver
from jaxkv.workloads import metrics as latency
from jaxkv.workloads import recordings
from scaling.costs import devices
from scaling.shapes import published

TRACES = ("azure_conv", "azure_code")
FOLDER = "JAXKV_DATA"
"""The environment's variable that names the folder in which `traces/` lies."""

MAX_SLOTS, HEAD = 256, 16
BUDGET = 2048
"""Tokens fed in a step: prompts are read in chunks beside what decodes."""
MAX_LENGTH = 1 << 14
"""Tokens of the longest request; some are longer than the models were made for."""


def capacity(model: str, device: str, num_devices: int) -> Capacity:
    """The pages that fit beside the weights."""
    found = published.describe(model)
    return Capacity.of(
        num_pages=cost_models.num_pages(found, device, num_devices),
        page_size=cost_models.PAGE_SIZE,
        max_length=MAX_LENGTH,
        token_budget=BUDGET,
    )


def check_room(model: str, device: str, num_devices: int) -> None:
    """Refuses devices that do not hold a model and its longest request.

    Raises:
      ValueError: they do not, or the model or the device is unknown.
    """
    pages = cost_models.num_pages(published.describe(model), device, num_devices)
    if pages * cost_models.PAGE_SIZE < MAX_LENGTH:
        raise ValueError(
            f"{model} and {MAX_LENGTH:,} tokens do not fit {num_devices} x "
            f"{devices.find(device).name}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Who replays which recordings, on what."""

    traces: tuple[str, ...] = TRACES
    """Recordings, from the folder that JAXKV_DATA names."""
    models: tuple[str, ...] = ("llama-2-7b", "llama-2-13b")
    """Who replays them."""
    num_devices: tuple[int, ...] = (1, 2, 4)
    """On so many GPUs."""
    device: str = "a100-80gb"
    """Of this kind."""

    def __post_init__(self) -> None:
        """Refuses models that the GPUs do not hold."""
        validation.among(self, "traces", known=TRACES, least=1)
        validation.at_least(self, "num_devices")
        for name, num in self.asked:
            check_room(name, self.device, num)

    @property
    def asked(self) -> list[tuple[str, int]]:
        """Every model on every number of GPUs."""
        return [*itertools.product(self.models, self.num_devices)]


SWITCH = ("traces", True)

CONFIGS = {"azure": Config()}


def find(trace: str) -> Path:
    """Finds a recording.

    Raises:
      ValueError: the folder is not named, or holds no such file.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        raise ValueError(
            f"{FOLDER} names no folder: replays need its traces/{trace}.csv, and are "
            "skipped without"
        )
    path = Path(folder) / "traces" / f"{trace}.csv"
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; {FOLDER} names its folder")
    return path


def run(config: Config, progress: Progress = QUIET) -> list[Row]:
    """Replays recordings, each by every model on every number of GPUs at a time."""
    rows: list[Row] = []
    for trace in config.traces:
        recording = recordings.read(find(trace))
        progress.show(f"{trace}: {recording.prompt.size:,} requests")
        members = [
            SimulationMember(
                recording.workload(),
                capacity(name, config.device, num),
                fcfs.fcfs(),
                named_costs.find(f"roofline:{name}:{config.device}:{num}").cost,
            )
            for name, num in config.asked
        ]
        served = driver.simulate(
            driver.stack(members), max_slots=MAX_SLOTS, head=HEAD, progress=progress
        )
        if progress.stopped:  # before everybody was answered
            break
        rows += [
            {"panel": trace, "trace": trace, "model": name, "num_devices": num}
            | _row(served, i, recording)
            for i, (name, num) in enumerate(config.asked)
        ]
    return rows


def _row(served: SimulationResult, index: int, recording: recordings.Recording) -> Row:
    arrival_s, first_s, finish_s = (
        x[index] for x in (served.arrival_s, served.first_s, served.finish_s)
    )
    output = recording.output
    waits_s = latency.time_to_first_token_s(arrival_s, first_s)
    each_s = latency.time_per_output_token_s(first_s, finish_s, output)
    answered = ~np.isnan(finish_s)
    # Rejected requests are counted beside the latencies, which are of the rest.
    asked = ~served.rejected[index]
    several = asked & (output > 1)
    came_s = np.where(asked, arrival_s, np.nan)
    did = served.numbers(index)
    return did | {
        "num_requests": int(arrival_s.size),
        "num_answered": int(answered.sum()),
        "num_rejected": int(served.rejected[index].sum()),
        "recorded_s": float(recording.arrival_s[-1]),
        "finished_s": float(np.nanmax(finish_s)) if answered.any() else float("nan"),
        "normalised_s": float(latency.normalised_latency_s(came_s, finish_s, output)),
        "first_p50_s": float(latency.percentile(waits_s, 50, is_asked=asked)),
        "first_p99_s": float(latency.percentile(waits_s, 99, is_asked=asked)),
        "each_p50_s": float(latency.percentile(each_s, 50, is_asked=several)),
        "each_p99_s": float(latency.percentile(each_s, 99, is_asked=several)),
        "busy_share": did["busy_s"] / float(served.end_s[index]),
    }


def metrics(result: list[Row]) -> dict[str, Any]:
    """Lists the replays, under the names that the figures' metrics have."""
    return {"capacities": [], "rows": result}


def summary(result: list[Row]) -> list[Part]:
    """Lays out the replays."""
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
        "A roofline's GPUs: no real one is faster. GPUs share the work evenly and "
        "never wait for each other. Medians and 99th percentiles."
    )
    title = "recorded hours, replayed whole"
    return [report.row_sheet(title, result, columns, note)]


def plot(ax: Any, result: list[Row]) -> None:
    """Draws the time to the first token, 99 of 100, of every replay."""
    kinds = {"conv": "chat", "code": "code"}
    replays = itertools.groupby(result, lambda row: (row["trace"], row["model"]))
    for (trace, model), rows in replays:
        found = [(row["num_devices"], row["first_p99_s"]) for row in rows]
        kind, size = trace[6:], model.removeprefix("llama-2-")
        color = systems.BLUE if kind == "code" else systems.ORANGE
        is_small = size == "7b"
        look = {"linestyle": "-" if is_small else "--", "marker": "os"[not is_small]}
        label = f"{kinds.get(kind, kind)}, {size.upper()}"
        style.curve(ax, *zip(*found, strict=True), color, label, **look)
    style.powers_of_two(ax)
    title = "Llama-2 on A100s: first token by GPUs"
    slow = [x for x in result if x["first_p99_s"] > 1]
    if slow:
        worst = max(slow, key=lambda row: row["first_p99_s"])
        name = kinds.get(worst["trace"][6:], worst["trace"])
        title = f"Recorded {name} on {worst['num_devices']} A100: "
        size = worst["model"].removeprefix("llama-2-").upper()
        title += f"Llama-2-{size} answers after {worst['first_p99_s']:,.0f} s"
    y = "first token, 99th percentile [s]"
    style.titled(ax, title, "A100 [GPUs]", y, yscale="log")
    style.plain_log(ax.yaxis)
    ax.legend()
