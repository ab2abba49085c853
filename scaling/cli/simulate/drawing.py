"""Figures of `jaxkv simulate`: latencies and memory of a load, and of a sweep."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv import plotting
from jaxkv.plotting import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    draw_curve,
    draw_reference_line,
    render_figure,
    set_labels,
    shade_band,
)
from jaxkv.workloads import SustainedRate
from scaling.cli.simulate.case import ServerCase
from scaling.cli.simulate.summary import LEVEL, RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALPHA = 0.25


def render_simulation(
    case: ServerCase,
    summaries: Sequence[RunSummary],
    rows: Sequence[dict[str, Any]],
    largest: dict[float, SustainedRate],
) -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""

    def draw(axes: np.ndarray) -> None:
        if len(rows) > 1:
            _draw_sweep_objective(axes[0], case, rows, largest)
            _draw_sweep_first_token(axes[1], case, rows)
            _draw_sweep_memory(axes[2], rows)
        else:
            _draw_distribution(axes[0], summaries[0], "ttft", 1e3)
            _draw_distribution(axes[1], summaries[0], "e2e", 1.0)
            _draw_memory(axes[2], summaries[0])

    return render_figure(draw, panels=(3, 1), size_inches=(6.8, 2.8))


def render_stages(document: dict[str, Any]) -> dict[str, bytes]:
    """Draws the predicted stages with measured values, and returns the files by name.

    Overloaded stages are hollow.
    """
    rows = document["rows"]

    def draw(axes: np.ndarray) -> None:
        for ax, key, name, color in (
            (axes[0], "e2e_s", "end to end, mean", BLUE),
            (axes[1], "ttft_s", "first token, median", GREEN),
        ):
            _draw_stage_errors(ax, rows, key, name, color)

    return render_figure(draw, panels=(2, 1), size_inches=(6.8, 2.8))


def _draw_stage_errors(
    ax: "Axes", rows: Sequence[dict[str, Any]], key: str, name: str, color: int
) -> None:
    """Draws a latency of each stage: intervals, and measured values if there are."""
    look = plotting.colors()[color]
    compared = rows[0][key]["compared"]
    places = np.arange(1, len(rows) + 1)
    middle = np.array([row[key][compared] for row in rows])
    low, high = np.array([row[key]["interval"][compared] for row in rows]).T
    ax.vlines(places, low, high, color=look, linewidth=4, alpha=_ALPHA)
    overloaded = np.array([row["is_overloaded"] for row in rows])
    faces = [look if x else "white" for x in ~overloaded]
    ax.scatter(places, middle, color=look, facecolor=faces, label="predicted", zorder=3)
    title = f"Predicted {name}, {len(rows)} stages"
    if rows[0][key]["measured"] is not None:
        measured = [row[key]["measured"][compared] for row in rows]
        ax.scatter(places, measured, color="black", marker="x", label="measured")
        errors = [abs(row[key]["error"]) for row in rows if not row["is_overloaded"]]
        if errors:
            error = f"{100 * np.median(errors):.1f} % off in the median"
            title = f"{name.capitalize()}: {error}"
    if overloaded.any():
        title += "; hollow: overloaded"
    ax.locator_params(axis="x", integer=True)
    set_labels(ax, title, "row of the table", f"{name} [s]", yscale="log")
    ax.legend()


def _draw_sweep_objective(
    ax: "Axes",
    case: ServerCase,
    rows: Sequence[dict[str, Any]],
    largest: dict[float, SustainedRate],
) -> None:
    """Draws the probability of the objective, or the throughput without one."""
    rates = [x["rate_per_s"] for x in rows]
    x = "offered load [requests/s]"
    if not case.objectives:
        done = [row["requests_per_s"] for row in rows]
        draw_curve(ax, rates, done, BLUE, "finished")
        ax.plot(rates, rates, color="0.6", linewidth=1, linestyle="--", label="offered")
        title = f"{case.setup.model.name}: {max(done):.3g} requests/s at most"
        set_labels(ax, title, x, "finished [requests/s]")
        ax.legend()
        return
    probability = [100 * row["objective_probability"] for row in rows]
    limits = ", ".join(x.text for x in case.objectives)
    draw_curve(ax, rates, probability, BLUE, limits)
    low = largest[0.9]
    middle = largest[0.5]
    high = largest[0.1]
    if low.relation != "below":
        text = f"probability 90 to 10 %: {low.text} to {high.text} requests/s"
        ax.axvspan(low.rate, high.rate, color="0.85", zorder=0, label=text)
    title = f"Met up to {middle.text} requests/s with probability 50 %"
    set_labels(ax, title, x, "probability [%]", ylim=(-3, 103))
    ax.legend()


def _draw_sweep_first_token(
    ax: "Axes", case: ServerCase, rows: Sequence[dict[str, Any]]
) -> None:
    """Draws the statistics of the first token against the load."""
    looks = (("p50", GREEN, "s"), ("p99", ORANGE, "^"))
    for name, color, mark in looks:
        valid_rows = [x for x in rows if x["ttft_s"][name] is not None]
        at = [x["rate_per_s"] for x in valid_rows]
        draw_curve(
            ax, at, [x["ttft_s"][name] for x in valid_rows], color, name, marker=mark
        )
        low, high = (
            [x["ttft_s"]["interval"][name][side] for x in valid_rows] for side in (0, 1)
        )
        shade_band(ax, at, low, high, plotting.colors()[color], _ALPHA)
    for limit in (x for x in case.objectives if x.latency == "ttft"):
        draw_reference_line(ax, limit.limit_s, f"limit, {limit.limit_s:g} s")
    title = f"First token, with the interval of {100 * LEVEL:.0f} % of the draws"
    x = "offered load [requests/s]"
    set_labels(ax, title, x, "first token [s]", yscale="log")
    plotting.label_log_axis(ax.yaxis)
    ax.legend()


def _draw_sweep_memory(ax: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    """Draws the mean share of blocks in use against the load."""
    rates = [x["rate_per_s"] for x in rows]
    shares = [100 * x["memory"]["mean_share"] for x in rows]
    bands = [x["memory"]["interval"]["mean_share"] for x in rows]
    draw_curve(ax, rates, shares, PURPLE, "blocks in use", marker="D")
    low, high = ([100 * x[side] for x in bands] for side in (0, 1))
    shade_band(ax, rates, low, high, plotting.colors()[PURPLE], _ALPHA)
    overloaded = [100 * x["overloaded_share"] for x in rows]
    draw_curve(ax, rates, overloaded, ORANGE, "draws with a growing queue", marker="v")
    blocks = rows[0]["memory"]["num_blocks"]
    title = f"{max(shares):.0f} % of {blocks:,} K/V blocks are in use at most"
    x = "offered load [requests/s]"
    set_labels(ax, title, x, "share [%]", ylim=(-3, 103))
    ax.legend()


def _draw_distribution(
    ax: "Axes", summary: RunSummary, latency: str, scale: float
) -> None:
    """Draws the share of requests below a latency, for all draws."""
    name, unit, color = {
        "ttft": ("first token", "ms", GREEN),
        "e2e": ("end to end", "s", BLUE),
    }[latency]
    shares = np.arange(0.5, 100)
    values = scale * np.percentile(summary.latencies[latency], shares, axis=1)
    tail = 50 * (1 - LEVEL)
    low, middle, high = np.percentile(values, [tail, 50, 100 - tail], axis=1)
    ax.fill_betweenx(
        shares,
        low,
        high,
        color=plotting.colors()[color],
        alpha=_ALPHA,
        linewidth=0,
        label=f"{100 * LEVEL:.0f} % of the draws",
    )
    draw_curve(ax, middle, shares, color, "median of the draws", marker="")
    half = f"{middle[np.searchsorted(shares, 50)]:.3g} {unit}"
    title = f"Half of the requests: {name} within {half}"
    set_labels(ax, title, f"{name} [{unit}]", "requests [%]", ylim=(0, 100))
    ax.legend()


def _draw_memory(ax: "Axes", summary: RunSummary) -> None:
    """Draws the share of blocks in use over time."""
    if (curves := summary.memory_curves()) is None:
        ax.remove()
        return
    times, used = curves
    tail = 50 * (1 - LEVEL)
    low, middle, high = np.percentile(100 * used, [tail, 50, 100 - tail], axis=0)
    color = plotting.colors()[PURPLE]
    shade_band(ax, times, low, high, color, _ALPHA)
    ax.plot(times, middle, color=color, linewidth=1.2, label="median of the draws")
    title = f"K/V blocks in use: {100 * used.max():.3g} % at most"
    set_labels(ax, title, "time [s]", "blocks in use [%]", xlim=_span(times))
    ax.set_ylim(bottom=0)
    ax.legend()


def _span(values: np.ndarray) -> tuple[float, float]:
    return float(values[0]), float(values[-1])
