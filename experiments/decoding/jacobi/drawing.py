"""Draws a block as it is found, and what iterating gains."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.plotting import style

MOST_SHOWN = 40
"""Places of a block that have room for their characters."""


def draw(axes: Any, picture: Any, blocks: Any, runs: Any) -> None:
    """Draws the block above, over both panels; below steps, and speeds."""
    grid = axes[0, 0].get_subplotspec().get_gridspec()
    figure = axes[0, 0].figure
    for ax in axes[0]:
        ax.remove()
    _block(figure.add_subplot(grid[0, :]), picture)
    _steps(axes[1, 0], blocks)
    temperatures = runs.distinct("temperature")
    speeds(axes[1, 1], {_kind(x): runs.where(temperature=x) for x in temperatures})


def _block(ax: Any, picture: Any) -> None:
    """Guesses by iteration; from the first on, coloured where they are right."""
    title = "one block, greedy: right from the first on (dark), right by chance (light)"
    style.titled(ax, title, "token of the block", "iteration")
    if not len(picture):
        return
    tokens, fixed = picture.tokens[:, :MOST_SHOWN], picture.fixed
    place = np.arange(tokens.shape[1])[None, :]
    right = tokens == tokens[-1]
    shade = np.where(place < fixed[:, None], 2, np.where(right, 1, 0))
    blue = np.array(style.colors()[5])
    colors = np.stack([np.ones(3), 0.8 + 0.2 * blue, 0.45 + 0.55 * blue])
    ax.imshow(colors[shade], aspect="auto", interpolation="nearest")
    for row, column in np.ndindex(tokens.shape):
        text = _character(int(tokens[row, column]))
        ax.text(column, row, text, fontsize=4, ha="center", va="center")


def _character(token: int) -> str:
    """A byte as it is read; a mark for what has no shape."""
    if 32 < token < 127:
        return chr(token).replace("$", r"\$")
    return {10: "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", 32: "\N{MIDDLE DOT}"}.get(
        token, ""
    )


def _steps(ax: Any, blocks: Any) -> None:
    """Steps until a block is found, under the theorem's bound."""
    for nth, temperature in enumerate(blocks.distinct("temperature")):
        here = blocks.where(temperature=temperature)
        style.curve(ax, here.length, here.steps, (5, 6)[nth % 2], _kind(temperature))
    if len(blocks):
        lengths = blocks.distinct("length")
        ax.plot(lengths, lengths, "--", color="0.5", linewidth=0.8, label="at most")
        ax.legend()
    style.titled(ax, "iterations until nothing changes", "tokens of a block", "mean")


def _kind(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def speeds(ax: Any, found: Mapping[str, Any]) -> None:
    """Draws the engine's tokens a step and speeds, by drafts, of runs by their name."""
    for nth, (name, runs) in enumerate(found.items()):
        color = (5, 6)[nth % 2]
        style.curve(ax, runs.num_drafts, runs.tokens_per_step, color, name, "s:")
        style.curve(ax, runs.num_drafts, runs.speed, color, f"{name}, speed")
    ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
    if any(map(len, found.values())):
        ax.legend()
    title = "the engine: tokens a step (dotted), times as fast"
    style.titled(ax, title, "drafts a step", "times", ylim=(0, None))
