"""Draws the speed-up of speculation and its cost."""

from typing import TYPE_CHECKING

import numpy as np

from experiments import lab
from experiments.decoding.speculation import theory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.decoding.speculation.on_text import DecodingRuns, SyntheticDrafts
    from experiments.decoding.speculation.synthetic import TimedDrafts

DRAFT_COLORS = (lab.BLUE, lab.GREEN, lab.ORANGE, lab.RED)
"""Colours by draft length, ascending; markers follow."""
MARKERS = "o^ds"


def draw_speculation(
    axes: np.ndarray, runs: "DecodingRuns", coins: "SyntheticDrafts", num_drafts: int
) -> None:
    """Draws 4 panels: drafts and methods above, batches and synthetic drafts below."""
    greedy = runs.where(temperature=0.0)
    single = runs.where(batch=1)
    _lengths(axes[0, 0], single.where(temperature=0.0))
    ways = single.where(num_drafts=num_drafts)
    names = ways.way.tolist()
    label = "speed / plain decoding [ratio]"
    bars(axes[0, 1], ways, names, names, "speed", label)
    if len(ways):
        best = names[int(np.nanargmax(ways.speed))]
        speed = np.nanmax(ways.speed)
        axes[0, 1].set_title(
            f"{num_drafts} drafts: {best} is {speed:.2f} times as fast"
        )
    _batches(axes[1, 0], greedy.where(way="n-gram", num_drafts=num_drafts))
    _synthetic(axes[1, 1], coins)


def _lengths(ax: "Axes", runs: "DecodingRuns") -> None:
    """Draws tokens per step by draft length, with the formula as a dashed line."""
    best = ("", 0.0)
    for method in runs.distinct("way"):
        selected = runs.where(way=method)
        selected = selected.at(np.argsort(selected.num_drafts))
        if len(selected) < 2:
            continue
        lab.draw_curve(
            ax,
            selected.num_drafts,
            selected.expected,
            method,
            linestyle="--",
            linewidth=1,
            marker="",
        )
        lab.draw_curve(
            ax, selected.num_drafts, selected.tokens_per_step, method, method
        )
        max_tokens = float(selected.tokens_per_step.max())
        best = (method, max_tokens) if max_tokens > best[1] else best
    ax.plot([], [], "--", color="0.45", linewidth=1, label="if independent")
    title = "Tokens a step by drafts"
    if best[0]:
        title = f"Greedy: {best[0]} finds up to {best[1]:.1f} tokens a step"
    ax.legend()
    x = "drafts a step [tokens]"
    y = "found [tokens/step]"
    lab.set_labels(ax, title, x, y, ylim=(0, None))


def bars(
    ax: "Axes",
    runs: "DecodingRuns",
    names: list[str],
    kinds: list[str],
    field: str,
    label: str,
) -> None:
    """Draws a metric of every run: greedy above, temperature 1 below.

    Args:
      ax: axes.
      runs: runs with temperatures.
      names: names of the runs; equal names share a line.
      kinds: systems whose colours the runs have.
      field: name of the metric.
      label: label of the axis.
    """
    order = [*dict.fromkeys(names)]
    height = 0.44
    values = getattr(runs, field)
    for nth, temperature in enumerate((0.0, 1.0)):
        for i in np.flatnonzero(runs.temperature == temperature):
            place = order.index(names[i]) + height * (nth - 0.5)
            container = ax.barh(
                place,
                values[i],
                0.92 * height,
                color=lab.system_style(kinds[i]).color,
                edgecolor="white",
                hatch="////" if nth else None,
            )
            box = {"facecolor": "white", "linewidth": 0, "pad": 0.3}
            ax.bar_label(container, [f"{values[i]:.2f}"], padding=3, bbox=box)
    for name, hatch in (("greedy", ""), ("temperature 1", "////")):
        ax.fill_between(
            [],
            [],
            label=f"above: {name}" if not hatch else f"below: {name}",
            facecolor="0.45",
            edgecolor="white",
            hatch=hatch,
        )
    ax.set_yticks(range(len(order)), order)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(order), 1) - 0.4, -0.6)
    lab.draw_reference_line(ax, 1, "plain decoding", along="y")
    ax.margins(x=0.15)
    lab.set_labels(ax, "One sequence", label, "")
    ax.legend()


def _batches(ax: "Axes", runs: "DecodingRuns") -> None:
    """Draws speed and cost of a step by batch size."""
    runs = runs.at(np.argsort(runs.batch))
    for values, color, mark, label in (
        (runs.tokens_per_step, lab.GREEN, "^", "tokens a step"),
        (runs.cost, lab.RED, "s", "cost of a step"),
        (runs.speed, lab.BLUE, "o", "speed"),
    ):
        lab.draw_curve(ax, runs.batch, values, color, label, marker=mark)
    lab.draw_reference_line(ax, 1, "plain decoding")
    title = "n-gram drafts by batch"
    if len(runs):
        lab.use_powers_of_two(ax)
        title = f"n-gram is {np.nanmin(runs.speed):.1f} to {np.nanmax(runs.speed):.1f} "
        title += "times as fast at every batch"
    x = "batch [sequences]"
    y = "over plain decoding [ratio]"
    lab.set_labels(ax, title, x, y, ylim=(0, None))
    ax.legend()


def _synthetic(ax: "Axes", coins: "SyntheticDrafts") -> None:
    """Draws tokens per step of synthetic drafts, with lines of the formula."""
    chances = np.linspace(0, 1, 101)
    off = [0.0]
    for nth, num in enumerate(coins.distinct("num_drafts")):
        selected = coins.where(num_drafts=num)
        color = DRAFT_COLORS[nth % 4]
        line = theory.expected_tokens(chances, np.full(chances.size, num))
        ax.plot(chances, line, color="0.6", linewidth=1, zorder=0)
        look = {"linestyle": "", "marker": MARKERS[nth % 4]}
        tokens = selected.tokens_per_step
        lab.draw_curve(ax, selected.acceptance, tokens, color, f"{num}", **look)
        exact = theory.expected_tokens(selected.acceptance, np.full(len(selected), num))
        off += np.abs(tokens / exact - 1).tolist()
    title = "Tokens a step by acceptance"
    if len(coins):
        ax.legend(title="drafts a step (line: formula)")
        title = f"Synthetic drafts follow the formula to {100 * max(off):.1f} %"
    x = "acceptance of a draft [share]"
    y = "found [tokens/step]"
    lab.set_labels(ax, title, x, y, ylim=(0, None))


def draw_priced(axes: np.ndarray, priced: "TimedDrafts") -> None:
    """Draws tokens per step and speed by acceptance rate, with theory dashed."""
    for ax, field, reference, words, y in (
        (
            axes[0],
            "tokens_per_step",
            "expected",
            "tokens a step",
            "found [tokens/step]",
        ),
        (axes[1], "speed", "predicted", "speed", "speed / plain decoding [ratio]"),
    ):
        off = [0.0]
        for nth, num in enumerate(priced.distinct("num_drafts")):
            selected = priced.where(num_drafts=num)
            color = DRAFT_COLORS[nth % 4]
            line = getattr(selected, reference)
            points = getattr(selected, field)
            look = {"linestyle": "--", "marker": ""}
            lab.draw_curve(ax, selected.acceptance, line, color, linewidth=1, **look)
            look = {"linestyle": "", "marker": MARKERS[nth % 4]}
            lab.draw_curve(
                ax, selected.acceptance, points, color, f"{num}", markersize=6, **look
            )
            off += np.abs(points / line - 1).tolist()
        lab.draw_reference_line(ax, 1)
        title = f"Theory predicts the {words} to {100 * np.nanmax(off):.0f} %"
        x = "acceptance of a draft [share]"
        lab.set_labels(ax, title, x, y, ylim=(0, None))
        if len(priced):
            ax.plot([], [], "--", color="0.45", linewidth=1, label="theory")
            ax.legend(title="drafts a step")
