"""Draws all ways on the same axes, and lengths that adapt by batch."""

from typing import Any

import numpy as np

from experiments.decoding.speculation.drawing import bars
from experiments.plotting import style

KINDS = {
    "n-gram": 5,
    "Jacobi": 3,
    "lookahead": 4,
    "early": 6,
    "Medusa": 1,
    "EAGLE": 2,
    "draft": 0,
}


def draw(axes: Any, ways: Any, adaptive: Any) -> None:
    """Draws four panels: tokens and speeds of ways, their costs, and batches."""
    _bars(axes[0, 0], ways, "tokens_per_step", "tokens a step")
    _bars(axes[0, 1], ways, "speed", "times as fast as plain decoding")
    _costs(axes[1, 0], ways.where(temperature=0.0))
    _batches(axes[1, 1], adaptive)


def _bars(ax: Any, runs: Any, field: str, label: str) -> None:
    """A number of every way with its drafts."""
    ways = runs.way.tolist()
    names = [f"{way}, {num}" for way, num in zip(ways, runs.num_drafts, strict=True)]
    bars(ax, runs, names, [KINDS[_kind(way)] for way in ways], field, label)


def _kind(way: str) -> str:
    return next(kind for kind in KINDS if way.startswith(kind))


def _costs(ax: Any, runs: Any) -> None:
    """What a step costs against what it gives; above the line it loses."""
    for kind in KINDS:
        here = runs.at(np.array([way.startswith(kind) for way in runs.way], bool))
        if len(here):
            color = KINDS[kind]
            style.curve(ax, here.tokens_per_step, here.cost, color, kind, "o")
    top = max([2.0, *runs.tokens_per_step])
    ax.plot([1, top], [1, top], "--", color="0.5", linewidth=0.8, label="even")
    title = "one sequence, greedy: below the line it pays"
    style.titled(ax, title, "tokens a step", "cost of a step, in plain ones")
    # Room for the legend above all points.
    ax.set_ylim(top=1.3 * max([top, *runs.cost]))
    ax.legend(fontsize=6, ncols=3, columnspacing=1.0, loc="upper left")


def _batches(ax: Any, runs: Any) -> None:
    """Speeds of lengths that adapt against the sequences decoded together."""
    for way in runs.distinct("way"):
        for temperature in runs.distinct("temperature"):
            here = runs.where(way=way, temperature=temperature)
            here = here.at(np.argsort(here.batch))
            line = "o-" if temperature == 0 else "s:"
            kind = _kind(way)
            words = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            label = f"{kind}, {words}"
            style.curve(ax, here.batch, here.speed, KINDS[kind], label, line)
    ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
    if len(runs):
        style.powers_of_two(ax)
        ax.legend(fontsize=6)
    title = "a length that adapts, over plain decoding"
    style.titled(ax, title, "sequences at once", "times as fast", ylim=(0, None))
