"""Draws all ways on the same axes, and lengths that adapt by batch."""

from typing import Any

import numpy as np

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


def _color(way: str) -> Any:
    kind = next(kind for kind in KINDS if way.startswith(kind))
    return style.colors()[KINDS[kind]]


def _names(runs: Any) -> list[str]:
    return [f"{way}, {num}" for way, num in zip(runs.way, runs.num_drafts, strict=True)]


def _bars(ax: Any, runs: Any, field: str, label: str) -> None:
    """A number of every way, greedy and drawn."""
    names, height = [*dict.fromkeys(_names(runs))], 0.4
    for nth, temperature in enumerate((0.0, 1.0)):
        here = runs.where(temperature=temperature)
        if not len(here):
            continue
        place = [names.index(name) + height * (nth - 0.5) for name in _names(here)]
        colors = [_color(way) for way in here.way]
        values = getattr(here, field)
        bars = ax.barh(place, values, 0.9 * height, color=colors)
        for bar in bars:
            bar.set_alpha(1.0 - 0.5 * nth)
        ax.bar_label(bars, [f"{x:.2f}" for x in values], fontsize=5, padding=2)
    ax.set_yticks(range(len(names)), names, fontsize=6)
    ax.invert_yaxis()
    ax.axvline(1, color="0.6", linewidth=0.8)
    ax.margins(x=0.15)
    style.titled(ax, "one sequence; faint: temperature 1", label, "")


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
    ax.legend(fontsize=6)


def _batches(ax: Any, runs: Any) -> None:
    """Speeds of lengths that adapt against the sequences decoded together."""
    for way in runs.distinct("way"):
        for temperature in runs.distinct("temperature"):
            here = runs.where(way=way, temperature=temperature)
            here = here.at(np.argsort(here.batch))
            line = "o-" if temperature == 0 else "s:"
            kind = next(kind for kind in KINDS if way.startswith(kind))
            words = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            label = f"{kind}, {words}"
            style.curve(ax, here.batch, here.speed, KINDS[kind], label, line)
    ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
    if len(runs):
        style.powers_of_two(ax)
        ax.legend(fontsize=6)
    title = "a length that adapts, over plain decoding"
    style.titled(ax, title, "sequences at once", "times as fast", ylim=(0, None))
