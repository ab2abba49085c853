"""Draws what speculation gains, and what it costs."""

from typing import Any

import numpy as np

from experiments.decoding.speculation import theory
from experiments.plotting import style

COLORS = {
    "n-gram": 5,
    "Jacobi": 3,
    "early exit, 1 layer": 6,
    "early exit, 2 layers": 1,
}


def draw(axes: Any, runs: Any, coins: Any, num_drafts: int) -> None:
    """Draws four panels: drafts and ways above, batches and coins below."""
    greedy = runs.where(temperature=0.0)
    alone = runs.where(batch=1)
    _lengths(axes[0, 0], alone.where(temperature=0.0))
    ways = alone.where(num_drafts=num_drafts)
    names, label = ways.way.tolist(), "times as fast as plain decoding"
    bars(axes[0, 1], ways, names, [COLORS[x] for x in names], "speed", label)
    _batches(axes[1, 0], greedy.where(way="n-gram", num_drafts=num_drafts))
    _coins(axes[1, 1], coins)


def _lengths(ax: Any, runs: Any) -> None:
    """Tokens a step against drafts, and the formula as a broken line."""
    for way in runs.distinct("way"):
        here = runs.where(way=way)
        here = here.at(np.argsort(here.num_drafts))
        if len(here) < 2:
            continue
        look: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.7, "zorder": 0}
        color = style.colors()[COLORS[way]]
        ax.plot(here.num_drafts, here.expected, "--", color=color, **look)
        style.curve(ax, here.num_drafts, here.tokens_per_step, COLORS[way], way)
    ax.plot([], [], "--", color="0.5", linewidth=0.8, label="if independent")
    title = "one sequence, greedy"
    style.titled(ax, title, "drafts a step", "tokens a step", ylim=(1, None))
    if len(runs):
        ax.legend()


def bars(
    ax: Any, runs: Any, names: list[str], colors: list[int], field: str, label: str
) -> None:
    """Draws a number of every run, by its name, greedy and, faint, drawn."""
    order, height, values = [*dict.fromkeys(names)], 0.46, getattr(runs, field)
    for nth, temperature in enumerate((0.0, 1.0)):
        here = np.flatnonzero(runs.temperature == temperature)
        if not here.size:
            continue
        place = [order.index(names[i]) + height * (nth - 0.5) for i in here]
        look = {"color": [style.colors()[colors[i]] for i in here]}
        drawn = ax.barh(place, values[here], 0.85 * height, alpha=1 - nth / 2, **look)
        ax.bar_label(drawn, [f"{x:.2f}" for x in values[here]], fontsize=5, padding=2)
    ax.set_yticks(range(len(order)), order, fontsize=6)
    ax.invert_yaxis()
    ax.axvline(1, color="0.6", linewidth=0.8)
    ax.margins(x=0.15)
    style.titled(ax, "one sequence; faint: temperature 1", label, "")


def _batches(ax: Any, runs: Any) -> None:
    """Speeds and costs of a step against the sequences decoded together."""
    runs = runs.at(np.argsort(runs.batch))
    style.curve(ax, runs.batch, runs.tokens_per_step, 0, "tokens a step", "s:")
    style.curve(ax, runs.batch, runs.cost, 6, "cost of a step")
    style.curve(ax, runs.batch, runs.speed, 5, "times as fast")
    ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
    if len(runs):
        style.powers_of_two(ax)
    title = "n-grams, over plain decoding of the batch"
    style.titled(ax, title, "sequences at once", "times", ylim=(0, None))
    ax.legend()


def _coins(ax: Any, coins: Any) -> None:
    """Tokens a step by coins, on the lines of the formula."""
    chances = np.linspace(0, 1, 101)
    for nth, num in enumerate(coins.distinct("num_drafts")):
        here, color = coins.where(num_drafts=num), (5, 3, 1, 6)[nth % 4]
        line = theory.tokens_of(chances, np.full(chances.size, num))
        ax.plot(chances, line, color="0.7", linewidth=0.8, zorder=0)
        style.curve(ax, here.acceptance, here.tokens_per_step, color, f"{num}", "o")
    title = "drafts accepted by coins, on the formula"
    style.titled(ax, title, "acceptance of each", "tokens a step")
    if len(coins):
        ax.legend(title="drafts", title_fontsize=7)


def draw_priced(axes: Any, priced: Any) -> None:
    """Draws tokens a step, and speeds, by chance; theory as broken lines."""
    for ax, found, theirs, title in (
        (axes[0], "tokens_per_step", "expected", "tokens a step"),
        (axes[1], "speed", "predicted", "times as fast as plain decoding"),
    ):
        for nth, num in enumerate(priced.distinct("num_drafts")):
            here, color = priced.where(num_drafts=num), (5, 3, 6, 1)[nth % 4]
            line = getattr(here, theirs)
            look: dict[str, Any] = {"linewidth": 0.8, "color": style.colors()[color]}
            ax.plot(here.acceptance, line, "--", zorder=0, **look)
            style.curve(ax, here.acceptance, getattr(here, found), color, f"{num}", "o")
        ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        style.titled(ax, title, "acceptance of each draft", "times", ylim=(0, None))
        if len(priced):
            ax.plot([], [], "--", color="0.5", linewidth=0.8, label="theory")
            ax.legend(title="drafts", title_fontsize=7)
