"""Figure of the lectures' numbers: latencies, KV caches and batches."""

import math
from typing import TYPE_CHECKING

import numpy as np

from experiments import lab
from experiments.counting.lecture_numbers.bounds import (
    BATCH_SIZES,
    CONTEXT_LENGTHS,
    AttentionGrowth,
    LatencyBounds,
    Result,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws latencies, operations of attention, and intensity by batch size."""
    latencies, growth, intensity = axes
    _latencies(latencies, result.latencies)
    _growth(growth, result.growth)
    _intensity(intensity, result)


def _latencies(ax: "Axes", latencies: LatencyBounds) -> None:
    """Draws the quoted latency and the bound of every model, with their ratio."""
    places = range(len(latencies.model))
    shares = []
    lab.draw_curve(
        ax, places, latencies.lecture_s, "published", "lecture", linestyle=""
    )
    lab.draw_curve(ax, places, latencies.bound_s, 5, "bandwidth bound", linestyle="")
    for x, low, high in zip(
        places, latencies.bound_s, latencies.lecture_s, strict=True
    ):
        ax.plot([x, x], [low, high], color="0.7", linewidth=1, zorder=0)
        shares.append(100 * low / high)
        at = x, math.sqrt(low * high)
        lab.annotate(ax, f"{shares[-1]:.0f} %", at, (5, 0), va="center_baseline")
    names = [str(name).removeprefix("gpt3-") for name in latencies.model]
    ax.set_xticks(places, [name.upper() for name in names])
    title = f"Quoted latencies use {min(shares):.0f} to {max(shares):.0f} % "
    title += "of the bandwidth"
    y = f"time of {latencies.tokens} tokens [s]"
    lab.set_labels(ax, title, "", y, xlim=(-0.4, len(names) - 0.2), yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.legend()


def _growth(ax: "Axes", growth: AttentionGrowth) -> None:
    """Draws operations with and without a KV cache, in total and of attention."""
    for values, label, name, line in (
        (growth.all_without, "all, without", "without the cache", "-"),
        (growth.scores_without, "attention, without", "without the cache", ":"),
        (growth.all_with, "all, with", "with the cache", "-"),
        (growth.scores_with, "attention, with", "with the cache", ":"),
    ):
        look = {"linestyle": line, "markersize": 3}
        lab.draw_curve(ax, growth.length, values, name, f"{label} cache", **look)
    lab.use_powers_of_two(ax)
    saved = growth.all_without[-1] / growth.all_with[-1]
    title = f"LLaMA-7B: a cache saves {saved:,.0f}-fold at {growth.length[-1]:,} tokens"
    x = "tokens generated [tokens]"
    y = "operations [FLOP]"
    lab.set_labels(ax, title, x, y, yscale="log")
    ax.set_xticks([x for x in growth.length if math.log2(x) % 2 == 0])
    ax.legend()


def _intensity(ax: "Axes", result: Result) -> None:
    """Draws operations per byte by batch size, and the ridge of the device."""
    marks = "osv^"
    for i, context in enumerate(CONTEXT_LENGTHS):
        look = {"marker": marks[i % 4], "markersize": 3}
        color = (5, 1, 6, 3)[i % 4]
        label = f"context of {context:,} token{'s' * (context > 1)}"
        lab.draw_curve(ax, BATCH_SIZES, result.intensity[i], color, label, **look)
    lab.draw_ridge(ax, result.device, result.ridge)
    lab.use_powers_of_two(ax)
    bound = [
        c
        for c, x in zip(CONTEXT_LENGTHS, result.intensity, strict=True)
        if max(x) < result.ridge
    ]
    title = "Decoding LLaMA-7B by batch"
    if bound:
        title = f"LLaMA-7B with {min(bound):,} cached tokens: memory-bound at every "
        title += "batch size"
    x = "batch [sequences]"
    y = "intensity [FLOP/byte]"
    lab.set_labels(ax, title, x, y, yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.set_xticks([x for x in BATCH_SIZES if math.log2(x) % 2 == 0])
    ax.legend()
