"""How much load does paged memory let a card serve before latencies grow?

The serving experiments of the paged-attention paper, figures 12 to 14, in simulated
time: the scheduler is the engine's own, lengths follow the printed means, and a model
of a step's time takes the place of the cards. Each system serves the same requests,
faster and faster: first at evenly spaced rates of the published axis, then where its
latency passes the bounds at which systems are compared. With `azure`, two recorded
hours of a cloud's requests are replayed whole.
"""

import dataclasses
import time
from typing import Any

import numpy as np

from experiments.framework import Claim, Part, Sheet, units
from experiments.serving.latency_vs_rate import (
    azure,
    capacity,
    drawing,
    published,
    runs,
    settings,
)
from experiments.serving.latency_vs_rate.panels import PANELS as FIGURES
from experiments.serving.latency_vs_rate.panels import Panel
from jaxkv import validation
from jaxkv.progress import QUIET, Progress

PANELS = drawing.GRID
PANEL_SIZE_INCHES = (2.6, 1.9)

BEYOND = 2.0
"""How far beyond the published axis rates are tried of a system that bears all of it,
as a multiple of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which panels, for how long, at how many rates."""

    panels: tuple[str, ...] = tuple(FIGURES)
    """Of figures 12 and 14, as the paper names them."""
    traces: tuple[str, ...] = ()
    """Recordings to replay, of `azure_conv` and `azure_code`, from JAXKV_DATA."""
    models: tuple[str, ...] = ("llama-2-7b", "llama-2-13b")
    """Who replays them."""
    num_devices: tuple[int, ...] = (1, 2, 4)
    """On so many cards."""
    device: str = "a100-80gb"
    """Of this kind."""
    hours_share: float = 1.0
    """Of the time that a panel has: the published hour of load, a quarter of one for
    OPT-175B and, where as many requests come in that, for Alpaca."""
    num_rates: int = 8
    """Rates of each system, evenly spaced on the published axis."""
    num_near: int = 4
    """More of them, between those at which its latency passes the bounds."""
    systems: tuple[str, ...] = settings.SYSTEMS
    """Who serves."""
    seed: int = 0
    """Of lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what cannot be served."""
        for name, known in (
            ("panels", FIGURES),
            ("traces", azure.TRACES),
            ("systems", settings.SYSTEMS),
        ):
            if unknown := sorted({*getattr(self, name)} - {*known}):
                raise ValueError(f"{name}={unknown} must be in {[*known]}")
        validation.within(self, "hours_share", low=0, high=24, ends="(]")
        if self.num_rates < 2 or self.num_near < 0:
            raise ValueError(
                f"{self.num_rates=} must be at least 2, {self.num_near=} 0"
            )
        if self.traces:
            azure.check(self.models, self.device, self.num_devices)


CONFIGS = {
    "smoke": Config(
        panels=("12a",),
        hours_share=0.02,
        num_rates=2,
        num_near=0,
        systems=("Orca (Oracle)", "paged"),
    ),
    "paper": Config(),
    "figure_12a": Config(panels=("12a",)),
    "azure": Config(panels=(), traces=("azure_conv", "azure_code")),
}


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Serves every panel; ended early, it has those that are done."""
    rows: list[dict[str, Any]] = []
    for name in config.panels:
        if progress.stopped:
            break
        progress.show(f"figure {name}: {FIGURES[name].title}")
        rows += [{"panel": name, **row} for row in _panel(config, name, progress)]
    for trace in config.traces:
        if progress.stopped:
            break
        rows += azure.replay(
            trace, config.models, config.device, config.num_devices, progress
        )
    return rows


def _panel(config: Config, name: str, progress: Progress) -> list[dict[str, Any]]:
    panel, most = FIGURES[name], BEYOND * FIGURES[name].axis
    setting = panel.setting()
    seconds = 3600 * panel.hours * config.hours_share
    requests = runs.load(setting.law, most, seconds, config.seed)
    even = panel.axis * np.arange(1, config.num_rates + 1) / config.num_rates
    systems = [x for x in panel.systems if x in config.systems]
    rates = {system: even.tolist() for system in systems}
    found: list[dict[str, Any]] = []
    near: set[str] = set()
    for turn in range(3 if config.num_near else 1):
        began = time.perf_counter(), time.process_time()
        rows = runs.serve(setting, requests, rates, progress)
        took = {
            "turn": turn,
            "took_s": time.perf_counter() - began[0],
            "processor_s": time.process_time() - began[1],
        }
        found += [took | row for row in rows]
        rates = {}
        for system in systems:
            curve = capacity.curve(found, system)
            if not curve.rates.size or system in near:
                continue
            if capacity.bears_all(curve):
                more = np.linspace(curve.rates[-1], most, config.num_near + 1)[1:]
            else:
                near.add(system)
                more = capacity.between(curve, config.num_near)
            rates[system] = more.tolist()
    return found


def claims(result: list[dict[str, Any]]) -> list[Claim]:
    """Holds capacities and batches against the published ones."""
    return published.claims(result)


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives what each system bears, and what the replays took."""
    return {
        "capacities": [
            {
                "panel": panel,
                "system": system,
                "relation": found.relation,
                "rate_per_s": found.rate,
            }
            for panel, curves in capacity.curves(result).items()
            for system, curve in curves.items()
            for found in [capacity.at(curve)]
        ],
        "rows": result,
    }


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Lays out capacities, what happened at the published axes' ends, and replays."""
    parts: list[Part] = []
    curves = capacity.curves(result)
    if curves:
        parts += [_capacities(curves), _ends(result), _speed(result)]
    return parts + azure.summary(result)


def _capacities(curves: Any) -> Sheet:
    rows = []
    for name, systems in curves.items():
        found = {x: capacity.at(curve) for x, curve in systems.items()}
        ours = found.get("paged")
        cells = []
        for system in settings.SYSTEMS:
            end = found.get(system)
            text = "-" if end is None else end.text
            if end and ours and end is not ours and end.relation == "is":
                text += f" ({ours.rate / end.rate:.2f})"
            cells.append(text)
        rows.append((name, FIGURES[name].title, *cells))
    return Sheet(
        f"requests/s at {capacity.BOUND} s a token",
        ("figure", "load", *settings.SYSTEMS),
        rows,
        "In brackets: how many times that the paged system bears.",
    )


def _ends(result: list[dict[str, Any]]) -> Sheet:
    rows = [
        (
            row["panel"],
            row["system"],
            units.rate(row["rate_per_s"]),
            units.seconds(row["normalised_s"]),
            f"{row['batch']:.2f}",
            units.seconds(row["step_s"]),
            units.share(row["tokens_share"]),
            f"{row['num_preempted'] / row['num_requests']:.2f}",
            units.share(row["recomputed_share"]),
        )
        for row in capacity.ends(result)
    ]
    heads = ("figure", "system", "requests/s", "s a token", "batch", "step")
    return Sheet(
        "at the end of the published axis",
        (*heads, "memory with tokens", "preempted a request", "recomputed"),
        rows,
        "Latencies here are lower bounds where the queue grows without end.",
    )


def _speed(result: list[dict[str, Any]]) -> Sheet:
    found = {(row["panel"], row["turn"]): row for row in result if "turn" in row}
    rows = []
    for (name, turn), row in found.items():
        here = [x for x in result if (x["panel"], x.get("turn")) == (name, turn)]
        times = (row["took_s"], row["processor_s"])
        requests = f"{sum(x['num_requests'] for x in here):,}"
        each = map(units.seconds, times)
        rows.append(
            (
                name,
                ("even", "beyond or near", "near")[turn],
                str(len(here)),
                requests,
                *each,
            )
        )
    heads = ("figure", "rates", "simulations", "requests", "wall clock", "processors")
    return Sheet("time to simulate", heads, rows, "Compilation included.")


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws every panel, the batches of figure 13, and the replays."""
    drawing.draw(axes, result)


__all__ = ["CONFIGS", "Config", "Panel", "claims", "metrics", "plot", "run", "summary"]
