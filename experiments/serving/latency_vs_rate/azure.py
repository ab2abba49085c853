"""Recorded hours of a cloud's requests, replayed whole on simulated cards.

The step's time is the roofline of the data sheet: a bound that real cards stay below.

Source of the recordings: Patel et al. 2024 (Splitwise), arXiv:2311.18677.
"""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.framework import Part, Sheet, units
from experiments.harness import cost_models
from jaxkv.progress import Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, Members, Served, driver
from jaxkv.workloads import recordings
from scaling.costs import Device, devices, parameters, serving
from scaling.shapes import Description, published

TRACES = ("azure_conv", "azure_code")
FOLDER = "JAXKV_DATA"
"""The environment's variable that names the folder in which `traces/` lies."""

MEMORY_SHARE = 0.9
"""Of a card's memory that is used, vLLM's default; the rest is for activations."""
PAGE_SIZE, MAX_SLOTS, HEAD = 16, 256, 16
BUDGET = 2048
"""Tokens fed in a step: prompts are read in chunks beside what decodes."""
MAX_LENGTH = 1 << 14
"""Tokens of the longest request; some are longer than the models were made for."""


def check(models: tuple[str, ...], device: str, num_devices: tuple[int, ...]) -> None:
    """Refuses models that a card does not hold, and recordings that are not there.

    Raises:
      ValueError: one line that says which.
    """
    card = devices.find(device)
    for name in models:
        model = published.describe(name)
        for num in num_devices:
            if num < 1:
                raise ValueError(f"{num_devices=} must be at least 1 each")
            if num_places(model, card, num) < MAX_LENGTH:
                raise ValueError(
                    f"{name} and {MAX_LENGTH:,} tokens do not fit {num} x {card.name}"
                )


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


def num_places(model: Description, card: Device, num_devices: int) -> int:
    """Tokens whose keys and values fit beside the weights."""
    left = MEMORY_SHARE * card.memory_bytes * num_devices
    left -= 2 * parameters.parameters(model).total
    return max(0, int(left // serving.kv_bytes_per_token(model)))


def replay(
    trace: str,
    models: tuple[str, ...],
    device: str,
    num_devices: tuple[int, ...],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Replays a recording by every model on every number of cards, all at a time."""
    recording = recordings.read(find(trace))
    card, workload = devices.find(device), recording.workload()
    progress.show(f"{trace}: {recording.prompt.size:,} requests")
    members, asked = [], [(name, num) for name in models for num in num_devices]
    for name, num in asked:
        model = published.describe(name)
        bounds = Capacity(
            num_pages=jnp.int32(num_places(model, card, num) // PAGE_SIZE),
            page_size=jnp.int32(PAGE_SIZE),
            max_length=jnp.int32(MAX_LENGTH),
            token_budget=jnp.int32(BUDGET),
            max_swap_pages=jnp.int32(0),
        )
        cost = cost_models.roofline(model, card, num_devices=num).cost
        members.append(Members(workload, bounds, fcfs.fcfs(), cost))
    served = driver.simulate(
        driver.stack(members), max_slots=MAX_SLOTS, head=HEAD, progress=progress
    )
    if progress.stopped:  # before everybody was answered
        return []
    return [
        {"panel": trace, "trace": trace, "model": name, "num_devices": num}
        | _row(served, i, recording)
        for i, (name, num) in enumerate(asked)
    ]


def _row(served: Served, index: int, recording: recordings.Recording) -> dict[str, Any]:
    arrival_s, first_s, finish_s = (
        x[index] for x in (served.arrival_s, served.first_s, served.finish_s)
    )
    rest = np.maximum(recording.output - 1, 1)
    each_s = ((finish_s - first_s) / rest)[recording.output > 1]
    fed = served.totals.decoded[index] + served.totals.read[index]
    answered = ~np.isnan(finish_s)

    def percentile(values: np.ndarray, percent: float) -> float:
        known = values[~np.isnan(values)]
        return float(np.percentile(known, percent)) if known.size else float("nan")

    return {
        "num_requests": int(arrival_s.size),
        "num_answered": int(answered.sum()),
        "num_rejected": int(served.rejected[index].sum()),
        "recorded_s": float(recording.arrival_s[-1]),
        "finished_s": float(np.nanmax(finish_s)) if answered.any() else float("nan"),
        "normalised_s": float(np.nanmean((finish_s - arrival_s) / recording.output)),
        "first_p50_s": percentile(first_s - arrival_s, 50),
        "first_p99_s": percentile(first_s - arrival_s, 99),
        "each_p50_s": percentile(each_s, 50),
        "each_p99_s": percentile(each_s, 99),
        "batch": float(served.means.batch[index]),
        "step_s": float(
            served.totals.busy_s[index] / max(1, served.totals.steps[index])
        ),
        "busy_share": float(served.totals.busy_s[index] / served.end_s[index]),
        "tokens_share": float(served.means.tokens[index]),
        "num_preempted": int(served.totals.preempted[index]),
        "recomputed_share": float(served.recomputed[index].sum() / max(1, fed)),
    }


def rows(result: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Picks the replays of a result."""
    return [row for row in result if row["panel"] in TRACES]


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Lays out the replays."""
    found = rows(result)
    if not found:
        return []
    lines = [
        (
            row["trace"],
            row["model"],
            f"{row['num_devices']}",
            f"{row['num_answered']:,} / {row['num_requests']:,}",
            units.seconds(row["first_p50_s"]),
            units.seconds(row["first_p99_s"]),
            units.seconds(row["each_p50_s"]),
            units.seconds(row["each_p99_s"]),
            f"{row['batch']:.1f}",
            units.share(row["busy_share"]),
            f"{row['num_preempted']:,}",
        )
        for row in found
    ]
    heads = ("recording", "model", "cards", "answered", "first token", "99 %")
    note = (
        "A roofline's cards: no real one is faster. Cards share the work evenly and "
        "never wait for each other. Medians and 99th percentiles."
    )
    return [
        Sheet(
            "recorded hours, replayed whole",
            (*heads, "each token", "99 %", "batch", "busy", "preempted"),
            lines,
            note,
        )
    ]
