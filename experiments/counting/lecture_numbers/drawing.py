"""The figure of the lectures' numbers: latencies, caches and batches."""

import math
from typing import Any

from experiments.counting.lecture_numbers.bounds import (
    BATCHES,
    CONTEXTS,
    Growth,
    Latencies,
    Result,
)
from experiments.plotting import style


def plot(axes: Any, result: Result) -> None:
    """Draws latencies, the work of attention, and what a batch does."""
    _latencies(axes[0], result.latencies)
    _growth(axes[1], result.growth)
    _intensity(axes[2], result)


def _latencies(ax: Any, found: Latencies) -> None:
    colors, places = style.colors(), range(len(found.model))
    ax.plot(places, found.lecture_s, "o", color="0.5", label="lecture")
    ax.plot(places, found.bound_s, "o", color=colors[5], label="bound")
    for x, low, high in zip(places, found.bound_s, found.lecture_s, strict=True):
        ax.plot([x, x], [low, high], color="0.8", linewidth=0.8, zorder=0)
        middle = math.sqrt(low * high)
        ax.annotate(f"{100 * low / high:.0f} %", (x + 0.08, middle), va="center")
    names = [str(name).removeprefix("gpt3-") for name in found.model]
    ax.set_xticks(places, names)
    title, y = "one request: share of the bandwidth", f"{found.tokens} tokens (s)"
    style.titled(ax, title, "", y, xlim=(-0.4, len(names) - 0.4), yscale="log")
    ax.legend(loc="upper right")


def _growth(ax: Any, growth: Growth) -> None:
    colors = style.colors()
    for values, label, color in (
        (growth.all_without, "all, no cache", colors[1]),
        (growth.scores_without, "attention, no cache", colors[6]),
        (growth.all_with, "all, cache", colors[2]),
        (growth.scores_with, "attention, cache", colors[5]),
    ):
        ax.plot(growth.length, values, color=color, label=label)
    ax.set_xscale("log", base=2)
    title = "LLaMA-7B with and without a cache"
    style.titled(ax, title, "tokens generated", "operations", yscale="log")
    ax.set_ylim(top=1e4 * growth.all_without[-1])  # room for the legend
    ax.legend(loc="upper left")


def _intensity(ax: Any, result: Result) -> None:
    colors = style.colors()
    for i, context in enumerate(CONTEXTS):
        ax.plot(BATCHES, result.intensity[i], color=colors[i + 1])
        end = BATCHES[-1], result.intensity[i][-1]
        look = {"fontsize": 7, "va": "center", "color": colors[i + 1]}
        style.note(ax, f"{context:,}", end, (3, 0), annotation_clip=False, **look)
    style.ridge(ax, result.device, result.ridge, BATCHES[0])
    ax.set_xscale("log", base=2)
    title, y = "decoding LLaMA-7B, by tokens kept", "operations per byte"
    style.titled(ax, title, "batch (sequences)", y, yscale="log")
    ax.set_ylim(top=max(float(result.intensity.max()), 4 * result.ridge))
