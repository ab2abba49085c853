"""Figures 12 to 14 of the paged-attention paper, drawn of our runs."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.latency_vs_rate import azure, capacity, published, settings
from experiments.serving.latency_vs_rate.panels import PANELS

GRID = (5, 3)
"""Figures 12 and 14 in two rows each, then figure 13 and the replays."""

_COLORS: dict[str, int] = dict(zip(settings.SYSTEMS, (4, 6, 1, 2, 5), strict=True))
_MARKS: dict[str, str] = dict(zip(settings.SYSTEMS, "vsd^o", strict=True))


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws on an array of axes, one after the other; the last ones may go."""
    curves, free = capacity.curves(rows), iter(axes.ravel())
    handles: Any = ([], [])
    for name, systems in curves.items():
        ax = next(free)
        _curves(ax, name, systems)
        handles = max(handles, ax.get_legend_handles_labels(), key=lambda x: len(x[0]))
    for name in published.BATCHES:
        here = [x for x in capacity.ends(rows) if x["panel"] == name]
        if here:
            _batches(next(free), name, here)
    if azure.rows(rows):
        _replays(next(free), azure.rows(rows))
    for k, ax in enumerate(free):
        if curves and not k:
            ax.set_axis_off()
            ax.legend(*handles, loc="center")
        else:
            ax.remove()


def _curves(ax: Any, name: str, curves: dict[str, capacity.Curve]) -> None:
    colors, panel = style.colors(), PANELS[name]
    for system, (rates, latency) in curves.items():
        ax.plot(
            rates,
            latency,
            marker=_MARKS[system],
            color=colors[_COLORS[system]],
            linewidth=0.9,
            markersize=2,
            label=system,
        )
    ax.set_xlim(0, panel.axis)
    ax.set_ylim(0, 1)
    ax.set_xlabel("requests/s")
    ax.set_ylabel("latency (s/token)")
    ax.set_title(f"{name}: {panel.title}")


def _batches(ax: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Bars of ours before the printed ones in grey."""
    printed, colors = published.BATCHES[name], style.colors()
    names = [x for x in printed if any(row["system"] == x for row in rows)]
    ours = {row["system"]: row["batch"] for row in rows}
    places = np.arange(len(names))
    ax.bar(places + 0.2, [printed[x] for x in names], 0.4, color="0.75")
    bars = [colors[_COLORS[x]] for x in names]
    ax.bar(places - 0.2, [ours[x] for x in names], 0.4, color=bars)
    for x, system in enumerate(names):
        for dx, value in ((-0.2, ours[system]), (0.2, printed[system])):
            ax.annotate(
                f"{value:.1f}",
                (x + dx, value),
                ha="center",
                va="bottom",
                fontsize=5.5,
            )
    ax.set_xticks(places, [x.replace("Orca ", "").strip("()") for x in names])
    ax.set_ylabel("requests at once")
    letter = "ab"[PANELS[name].data == "Alpaca"]
    rate = rows[0]["rate_per_s"]
    ax.set_title(f"13{letter}: {PANELS[name].data}, {rate:g}/s; paper grey")


def _replays(ax: Any, rows: list[dict[str, Any]]) -> None:
    """Time to the first token, median and 99 of 100, of every replay."""
    colors = style.colors()
    for k, trace in enumerate(dict.fromkeys(row["trace"] for row in rows)):
        here = [row for row in rows if row["trace"] == trace]
        for j, model in enumerate(dict.fromkeys(row["model"] for row in here)):
            mine = [row for row in here if row["model"] == model]
            ax.plot(
                [row["num_devices"] for row in mine],
                [row["first_p99_s"] for row in mine],
                marker="os"[j % 2],
                color=colors[1 + 4 * k],
                linestyle="-" if j == 0 else "--",
                label=f"{trace[6:]}, {model.removeprefix('llama-2-')}",
            )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    counts = sorted({row["num_devices"] for row in rows})
    ax.set_xticks(counts, [str(x) for x in counts])
    ax.set_xlabel("cards")
    ax.set_ylabel("first token, 99th percentile (s)")
    ax.set_title("Azure's hours, Llama-2")
    ax.legend(fontsize=6)
