"""Draws tails of latency, goodput, what links decide, and queues beside formulas."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.queues import (
    MACHINES,
    SERVICE_S,
    SPEED_UP,
    Queues,
    formula_s,
)
from experiments.serving.disaggregation.runs import Loads, each, goodputs
from experiments.serving.disaggregation.settings import EXAMPLE, KNOWN

GREY = "0.55"
LOOKS = {"both": ("both phases", 6), "prefill": ("prompts alone", 1)}
LOOKS |= {"decode": ("decoding alone", 3), "split": ("split", 5)}


RATES = "requests/s for each GPU"


def plot(axes: Any, result: Any) -> None:
    """Draws six panels."""
    alone, split = (x.where(name=EXAMPLE) for x in (result.alone, result.split))
    both, prefill, decode = (alone.where(role=x) for x in ("both", "prefill", "decode"))
    first_s, gap_s = KNOWN[EXAMPLE].objectives
    _draw_tail(axes[0, 0], "ttft_s", [both, prefill, split], first_s)
    _draw_tail(axes[0, 1], "tpot_s", [both, decode, split], gap_s)
    axes[0, 0].set(title="OPT-13B, 512 + 64 tokens", ylabel="first token, P90, s")
    label = "per output token, P90, s"
    axes[0, 1].set(title="the same, between tokens", ylabel=label)
    _draw_attained(axes[0, 2], [both, split])
    _draw_goodput(axes[1, 0], goodputs(result.alone, result.split))
    _draw_links(axes[1, 1], result.links, split)
    _draw_queues(axes[1, 2], result.queues)


def _draw_tail(ax: Any, field: str, lines: list[Loads], goal: float) -> None:
    for loads in filter(len, lines):
        values = getattr(loads, field)
        label, color = LOOKS[loads.role[0]]
        values = np.where(np.isfinite(values), values, np.nan)
        style.curve(ax, loads.rate_per_card, values, color, label)
    ax.axhline(goal, color=GREY, linewidth=0.8, linestyle=":")
    ax.set(xlabel=RATES, ylim=(0, 3 * goal))
    ax.set_xlim(left=0)
    ax.legend()


def _draw_attained(ax: Any, lines: list[Loads]) -> None:
    for loads in filter(len, lines):
        label, color = LOOKS[loads.role[0]]
        rates = loads.rate_per_card
        style.curve(ax, rates, 100 * loads.attained, color, label)
        for values, mark in ((loads.attained_first, ":"), (loads.attained_gap, "--")):
            style.curve(ax, rates, 100 * values, color, mark=mark, linewidth=0.8)
    ax.axhline(90, color=GREY, linewidth=0.8, linestyle=":")
    title = "objectives kept (dotted: first; dashed: between)"
    rates = f"{RATES} (split: 2 read and 1 decodes)"
    style.titled(ax, title, rates, "% of requests")
    ax.set_xlim(left=0)
    ax.legend(loc="lower left")


def _draw_goodput(ax: Any, rows: list[dict[str, Any]]) -> None:
    colors = style.colors()
    for i, row in enumerate(rows):
        together, split = row["together_per_card_per_s"], row["split_per_card_per_s"]
        base = together if together > 0 else np.nan
        for dx, value, color in ((-0.2, together, 6), (0.2, split, 5)):
            bar = ax.bar(i + dx, value / base, 0.36, color=colors[color])
            if np.isfinite(value / base):
                ax.bar_label(bar, [f"{value:.2g}"], fontsize=5)
        for ratio in {*KNOWN[row["name"]].ratio}:
            ax.plot([i + 0.2], [ratio], "D", color=GREY, markersize=3)
    names = [row["name"].replace(", ", "\n") for row in rows]
    ax.set_xticks(range(len(rows)), names)
    ax.tick_params("x", labelsize=6)
    title = "goodput, together and split (grey: published)"
    ax.set(title=title, ylabel=f"{RATES}, relative")


def _draw_links(ax: Any, links: Loads, split: Loads) -> None:
    speeds = {
        link / 1e9: each(links.where(link=link)) for link in links.distinct("link")
    }
    if len(split):
        speeds[settings.LINK / 1e9] = each(split)
    style.curve(ax, [*speeds], [*speeds.values()], 5)
    title = "how fast keys and values must cross over"
    style.titled(ax, title, "link from GPU to GPU, GB/s", RATES, xscale="log")
    ax.set_ylim(bottom=0)


def _draw_queues(ax: Any, queues: Queues) -> None:
    machines = zip(MACHINES, (1, SPEED_UP, 2), (6, 5, 3), strict=True)
    for i, (machine, speed_up, color) in enumerate(machines):
        rates = np.linspace(0.01, 0.93, 200) * speed_up / SERVICE_S
        exact = [formula_s(machine, rate) for rate in rates]
        style.curve(ax, rates, exact, color, machine, "-", linewidth=0.8)
        style.curve(ax, queues.rate, queues.simulated_s[i], color, mark="o")
    title, seconds = (
        "M/D/1: formulas, and simulated (dots)",
        "mean time to the first token, s",
    )
    style.titled(ax, title, "requests/s", seconds, ylim=(0, 0.45))
    ax.legend(loc="upper left")
