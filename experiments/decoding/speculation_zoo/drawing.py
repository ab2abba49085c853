"""Draws all methods on the same axes, and adaptive draft lengths by batch size."""

from typing import TYPE_CHECKING

import numpy as np

from experiments import lab
from experiments.decoding.speculation.drawing import bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.decoding.speculation.on_text import DecodingRuns

METHOD_KINDS = {
    "n-gram": "n-gram",
    "Jacobi": "Jacobi",
    "lookahead": "lookahead",
    "early": "early exit, 1 layer",
    "Medusa": "Medusa",
    "EAGLE": "EAGLE",
    "draft": "draft model",
}
"""System whose colour a method has, by the start of its name."""


def draw_methods(
    axes: np.ndarray, ways: "DecodingRuns", adaptive: "DecodingRuns"
) -> None:
    """Draws 4 panels: tokens, speeds and costs of methods, and batch sizes."""
    _bars(axes[0, 0], ways, "tokens_per_step", "found [tokens/step]")
    _bars(axes[0, 1], ways, "speed", "speed / plain decoding [ratio]")
    _costs(axes[1, 0], ways.where(temperature=0.0))
    _batches(axes[1, 1], adaptive)


def _bars(ax: "Axes", runs: "DecodingRuns", field: str, label: str) -> None:
    """Draws a metric of every method and draft length."""
    ways = runs.way.tolist()
    values = getattr(runs, field)
    names = [
        f"{method}, {num}" for method, num in zip(ways, runs.num_drafts, strict=True)
    ]
    bars(
        ax, runs, names, [METHOD_KINDS[_kind(method)] for method in ways], field, label
    )
    if not len(runs):
        return
    best = names[int(np.nanargmax(values))]
    peak = float(np.nanmax(values))
    if field == "speed":
        num = int(np.sum(values > 1))
        title = f"{best} is {peak:.2f} times as fast; {num} of {len(runs)} runs gain"
    else:
        title = f"One sequence: {best} finds {peak:.2f} tokens a step"
    ax.set_title(title)


def _kind(method: str) -> str:
    return next(kind for kind in METHOD_KINDS if method.startswith(kind))


def _costs(ax: "Axes", runs: "DecodingRuns") -> None:
    """Draws cost of a step by tokens per step; a point above the line loses speed."""
    for kind, name in METHOD_KINDS.items():
        selected = runs.at(
            np.array([method.startswith(kind) for method in runs.way], bool)
        )
        if len(selected):
            look = {"linestyle": "", "markersize": 7}
            lab.draw_curve(
                ax, selected.tokens_per_step, selected.cost, name, name, **look
            )
    top = max([2.0, *runs.tokens_per_step])
    ax.plot(
        [1, top],
        [1, top],
        label="even: below it pays",
        color="0.45",
        linewidth=1,
        linestyle="--",
    )
    num = int(np.sum(runs.cost < runs.tokens_per_step))
    title = f"One sequence, greedy: {num} of {len(runs)} ways pay"
    x = "found [tokens/step]"
    y = "cost of a step [plain steps]"
    lab.set_labels(ax, title, x, y, ylim=(0, None))
    ax.legend()


def _batches(ax: "Axes", runs: "DecodingRuns") -> None:
    """Draws the speed of adaptive draft lengths by batch size."""
    for method in runs.distinct("way"):
        for temperature in runs.distinct("temperature"):
            selected = runs.where(way=method, temperature=temperature)
            selected = selected.at(np.argsort(selected.batch))
            name = METHOD_KINDS[_kind(method)]
            line = "-" if temperature == 0 else ":"
            words = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            label = f"{name}, {words}"
            lab.draw_curve(
                ax, selected.batch, selected.speed, name, label, linestyle=line
            )
    lab.draw_reference_line(ax, 1, "plain decoding")
    title = "A draft length that adapts, by batch"
    if len(runs):
        lab.use_powers_of_two(ax)
        ax.legend()
        title = (
            "With a draft length that adapts, decoding is {:.2f} to {:.2f} times as "
        )
        title = title.format(np.nanmin(runs.speed), np.nanmax(runs.speed)) + "fast"
    x = "batch [sequences]"
    y = "speed / plain decoding [ratio]"
    lab.set_labels(ax, title, x, y, ylim=(0, None))
