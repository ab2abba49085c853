"""Figures 1 and 2 of the paged-attention paper, drawn of our runs."""

from typing import Any

import numpy as np

from experiments.framework import beside
from experiments.plotting import style
from experiments.serving.latency_vs_rate import published, settings

BOOK = beside(__file__)
BATCHES = published.BATCHES["12a"]
"""Requests served at once: figure 13a."""
SYSTEMS = settings.SYSTEMS[1:]
"""Those that run a request as soon as there is room for it."""
USES = {
    "tokens": "token states",
    "reserved": "reservation",
    "internal": "internal waste",
    "external": "external waste and rest",
}
"""What token places are, and how it is told: of K and V; of those to come; reserved for
none; the rest."""


def plot(axes: Any, result: Any) -> None:
    """Draws memory by part, the waste, the growth of memory, and throughput."""
    weights, places = result.weight_bytes / 1e9, result.kv_bytes / 1e9
    _draw_parts(axes[0][0], weights, places, result.memory_bytes / 1e9)
    _draw_uses(axes[0][1], result)
    _draw_memory(axes[1][0], result, weights, weights + places)
    throughput = axes[1][1]
    _draw_lines(throughput, result, result.growth.tokens_per_s, says_end=True)
    throughput.set(ylabel="tokens/s", title="throughput by requests at once")
    throughput.set_ylim(bottom=0)


def _draw_parts(ax: Any, weights: float, places: float, memory: float) -> None:
    """One bar: weights, keys and values, the rest; in GB."""
    colors, left = style.colors(), 0.0
    for label, size, color in (
        ("parameters", weights, "0.75"),
        ("keys and values", places, colors[6]),
        ("rest", memory - weights - places, colors[4]),
    ):
        ax.barh(0, size, left=left, color=color, height=0.5)
        is_narrow = size < 0.1 * memory
        ax.text(
            left + size / 2,
            0.3 if is_narrow else 0,
            f"{label}\n{size:.1f} GB\n{100 * size / memory:.0f} %",
            ha="center",
            va="bottom" if is_narrow else "center",
        )
        left += size
    ax.set(yticks=[], ylim=(-0.6, 0.9), xlabel="memory (GB)")
    ax.set_title("OPT-13B on an A100 of 40 GB")


def _draw_uses(ax: Any, result: Any) -> None:
    """Ours, and the published shares beside it, paler."""
    colors = [style.colors()[k] for k in (3, 4, 1, 6)]
    names, printed = result.system.tolist(), BOOK.published("uses")
    theirs = [[printed[name].get(use, 0.0) for use in USES.values()] for name in names]
    ours = 100 * result.waste.uses.mean(axis=1)
    places = np.arange(len(names))
    for shares, shift, alpha in ((ours, -0.2, 1.0), (np.array(theirs), 0.2, 0.45)):
        bottom = np.zeros(len(names))
        for values, use, color in zip(shares.T, USES.values(), colors, strict=True):
            look = {"color": color, "alpha": alpha, "bottom": bottom}
            bars = ax.bar(places + shift, values, 0.38, **look)
            texts = [f"{value:.1f}" if value > 4 else "" for value in values]
            ax.bar_label(bars, texts, label_type="center", fontsize=5.5)
            if alpha == 1.0:
                bars.set_label(use)
            bottom = bottom + values
    ax.set_xticks(places, [x.replace("Orca ", "Orca\n") for x in names])
    ax.set(
        ylim=(0, 130), ylabel="token places (%)", title="what they hold; paper's pale"
    )
    ax.legend(loc="upper left", ncols=2, fontsize=6)


def _draw_memory(ax: Any, result: Any, weights: float, full: float) -> None:
    look = {"xycoords": ("axes fraction", "data"), "ha": "right", "color": "0.4"}
    for label, height, line in (
        ("parameters", weights, "-"),
        ("all that there is for keys and values", full, ":"),
    ):
        ax.axhline(height, color="0.6", linewidth=0.8, linestyle=line)
        style.note(ax, label, (0.98, height), (0, 2), **look)
    _draw_lines(ax, result, result.growth.memory_bytes / 1e9, says_end=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=6)
    ax.set(ylim=(weights - 1, full + 2), ylabel="memory (GB)")
    ax.set_title("memory by requests at once")


def _draw_lines(ax: Any, result: Any, values: np.ndarray, *, says_end: bool) -> None:
    """Lines up to the last request that fits, and what there is there."""
    colors, requests = [style.colors()[k] for k in (6, 1, 2, 5)], result.growth.requests
    for name, line, color in zip(result.system, values, colors, strict=True):
        last = np.flatnonzero(np.isfinite(line))[-1]
        end = requests[last], line[last]
        ax.plot(requests, line, color=color, label=str(name))
        ax.plot(*end, "o", color=color)
        if says_end:
            text = f"{name}: {end[1]:.0f}"
            style.note(ax, text, end, (3, -4), va="top", color=color)
    ax.set(xlim=(0, 1.2 * requests[-1]), xlabel="requests at once")
