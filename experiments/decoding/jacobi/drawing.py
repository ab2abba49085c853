"""Draws the iterations of a block, and the speed-up of Jacobi decoding."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments import lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.decoding.jacobi.from_text import BlockTable, BlockTrace
    from experiments.decoding.speculation.on_text import DecodingRuns

MAX_SHOWN_TOKENS = 40
"""Largest number of drawn tokens of a block."""


def draw_jacobi(
    axes: np.ndarray, picture: "BlockTrace", blocks: "BlockTable", runs: "DecodingRuns"
) -> None:
    """Draws a block over both panels above; iterations and speeds below."""
    grid = axes[0, 0].get_subplotspec().get_gridspec()
    figure = axes[0, 0].figure
    for ax in axes[0]:
        ax.remove()
    _block(figure.add_subplot(grid[0, :]), picture)
    _steps(axes[1, 0], blocks)
    temperatures = runs.distinct("temperature")
    draw_speeds(axes[1, 1], {_kind(x): runs.where(temperature=x) for x in temperatures})


def _block(ax: "Axes", picture: "BlockTrace") -> None:
    """Draws the guesses of each iteration, coloured if correct."""
    title = "One greedy block: guesses that are right, by iteration"
    x = "place in the block [tokens]"
    y = "iteration [1]"
    if not len(picture):
        lab.set_labels(ax, title, x, y)
        return
    tokens = picture.tokens[:, :MAX_SHOWN_TOKENS]
    fixed = picture.fixed
    place = np.arange(tokens.shape[1])[None, :]
    right = tokens == tokens[-1]
    is_fixed = place < fixed[:, None]
    shade = np.where(is_fixed, 2, np.where(right, 1, 0))
    blue = np.array(lab.colors()[lab.BLUE])
    colors = np.stack([np.full(3, 0.96), 0.55 + 0.45 * blue, 0.1 + 0.9 * blue])
    ax.imshow(colors[shade], aspect="auto", interpolation="nearest")
    names = ("wrong", "right by chance", "right for good")
    for name, color in zip(names[::-1], colors[::-1], strict=True):
        ax.plot([], [], "s", color=color, markeredgecolor="0.6", label=name)
    ax.legend()
    num = int(np.argmax(fixed >= tokens.shape[1])) if len(fixed) else 0
    title = f"A block of {tokens.shape[1]} tokens is right for good after {num} "
    title += "iterations"
    lab.set_labels(ax, title, x, y)


def _steps(ax: "Axes", blocks: "BlockTable") -> None:
    """Draws mean iterations by block length, and the theorem's bound."""
    max_rate = 0.0
    for temperature in blocks.distinct("temperature"):
        selected = blocks.where(temperature=temperature)
        name = _kind(temperature)
        lab.draw_curve(ax, selected.length, selected.steps, name, name)
        max_rate = max(max_rate, float(np.max(selected.length / selected.steps)))
    title = "Iterations until the fixed point"
    if len(blocks):
        lengths = blocks.distinct("length")
        ax.plot(
            lengths, lengths, label="at most", color="0.45", linewidth=1, linestyle="--"
        )
        ax.legend()
        title = f"Iterating finds {max_rate:.2f} tokens a step at best"
    x = "length of a block [tokens]"
    y = "iterations [mean]"
    lab.set_labels(ax, title, x, y, ylim=(0, None))


def _kind(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def draw_speeds(ax: "Axes", runs_by_name: Mapping[str, "DecodingRuns"]) -> None:
    """Draws tokens per step and speed of the engine by draft length."""
    best = 0.0
    for nth, (name, runs) in enumerate(runs_by_name.items()):
        system = name if name in lab.SYSTEM_STYLES else (5, 6)[nth % 2]
        look = {"linestyle": ":", "marker": "^"}
        label = f"{name}, tokens a step"
        lab.draw_curve(ax, runs.num_drafts, runs.tokens_per_step, system, label, **look)
        lab.draw_curve(ax, runs.num_drafts, runs.speed, system, f"{name}, speed")
        if len(runs):
            best = max(best, float(np.nanmax(runs.speed)))
    lab.draw_reference_line(ax, 1, "plain decoding")
    title = "Speed of the engine by drafts"
    if any(map(len, runs_by_name.values())):
        ax.legend()
        title = f"The engine has at best {best:.2f} times the speed of plain decoding"
    x = "drafts a step [tokens]"
    y = "over plain decoding [ratio]"
    lab.set_labels(ax, title, x, y, ylim=(0, None))
