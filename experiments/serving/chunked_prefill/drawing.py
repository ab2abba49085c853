"""Draws stalls, what a budget costs, tails against rates, and capacities."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.chunked_prefill import settings
from experiments.serving.chunked_prefill.published import RATIOS
from experiments.serving.chunked_prefill.runs import (
    PATIENTS,
    Loads,
    Timeline,
    capacities,
)

GREY = "0.55"
SMALL: dict[str, Any] = {"color": GREY, "fontsize": 6}
COLORS = dict(zip((x.name for x in settings.SYSTEMS), (1, 6, 5, 3), strict=True))


def plot(axes: Any, result: Any) -> None:
    """Draws four panels."""
    _draw_timeline(axes[0, 0], result.timeline)
    _draw_budgets(axes[0, 1], result.budgets)
    if len(result.loads):
        _draw_loads(axes[1, 0], result.loads)
    _draw_capacities(axes[1, 1], capacities(result.loads))


def _draw_timeline(ax: Any, timeline: Timeline) -> None:
    """A tick for each token; every way has a line for each sequence."""
    colors, last = style.colors(), timeline.time_s.max()
    look: dict[str, Any] = {"markersize": 3, "markeredgewidth": 0.5}
    names = timeline.distinct("way")
    for i, name in enumerate(names):
        longest = 0.0
        for sequence in range(timeline.sequence.max() + 1):
            at = timeline.where(way=name, sequence=sequence).time_s
            is_late = sequence >= PATIENTS
            y = np.full(len(at), i + 0.13 * sequence - 0.26)
            ax.plot(at, y, "|", color=colors[1 + 4 * is_late], **look)
            if not is_late:
                longest = max(longest, np.diff(at).max())
        ax.text(last * 1.02, i, f"{1000 * longest:,.0f} ms", va="center", fontsize=6)
    ax.text(last * 1.02, -0.55, "longest stall", **SMALL)
    ax.set_yticks(range(len(names)), names)
    ax.set(
        title="two long prompts come while three are answered",
        xlabel="time, s (a tick is a token; blue: those who came late)",
        xlim=(0, 1.22 * last),
        ylim=(len(names) - 0.5, -0.75),
    )
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _draw_limits(ax: Any, model: str, x: float) -> None:
    for name, limit_s in settings.MODELS[model].limits_s.items():
        ax.axhline(limit_s, color=GREY, linewidth=0.8, linestyle=":")
        ax.text(x, limit_s * 1.06, name, **SMALL)


def _draw_budgets(ax: Any, budgets: Loads) -> None:
    for label, values, color in (
        ("first token, median", budgets.ttft_s, 5),
        ("between tokens, P99", budgets.tbt_p99_s, 6),
        ("between tokens, median", budgets.tbt_p50_s, 3),
    ):
        style.curve(ax, budgets.budget, values, color, label)
    style.powers_of_two(ax)
    _draw_limits(ax, budgets.model[0], budgets.budget[0])
    title = "chunks, mixed: what the token budget decides"
    style.titled(ax, title, "tokens a step", "time, s", yscale="log")
    ax.legend(loc="best")


def _draw_loads(ax: Any, loads: Loads) -> None:
    """The first model and data: the tail between tokens against the rate."""
    model, data = loads.model[0], loads.data[0]
    for system, color in COLORS.items():
        mine = loads.where(model=model, data=data, system=system)
        style.curve(ax, mine.rate, mine.tbt_p99_s, color, system)
    _draw_limits(ax, model, 0.02)
    title, tail = f"{model}, {data}: tail between tokens", "P99 time between tokens, s"
    style.titled(ax, title, "requests/s", tail, yscale="log")
    ax.set_xlim(left=0)
    ax.legend(loc="lower right")


def _draw_capacities(ax: Any, rows: list[dict[str, Any]]) -> None:
    """Bars for each case, over vLLM's; absolute rates at their ends."""
    cases = dict.fromkeys((x["model"], x["data"]) for x in rows)
    groups = [(*case, kind) for case in cases for kind in ("strict", "relaxed")]
    colors, width = style.colors(), 0.2
    theirs = {
        (x.model, x.data, x.objective, x.system): x.published
        for x in RATIOS
        if x.rival == "vLLM"
    }
    for i, (model, data, kind) in enumerate(groups):
        here = [x for x in rows if (x["model"], x["data"]) == (model, data)]
        rates = {x["system"]: x[f"{kind}_per_s"] for x in here}
        base = max(rates.get("vLLM", 0.0), 1e-9)
        for k, (system, color) in enumerate(COLORS.items()):
            rate = rates.get(system, 0.0)
            if not 0 < rate / base < 100:
                continue
            place = i + (k - 1.5) * width
            bar = ax.bar(place, rate / base, width * 0.9, color=colors[color])
            look = {"color": colors[color], "fontsize": 4.5, "rotation": 90}
            ax.bar_label(bar, [f" {rate:.2g}"], **look)
            if ratio := theirs.get((model, data, kind, system)):
                ax.plot([place], [ratio], "D", color=GREY, markersize=3)
    labels = [f"{m.split('-')[0]}\n{d}\n{k}" for m, d, k in groups]
    ax.set_xticks(range(len(groups)), labels, fontsize=5)
    ax.margins(y=0.2)
    ax.axhline(1, color=GREY, linewidth=0.6)
    ax.set(
        title="load sustained within the objective (grey: published)",
        ylabel="requests/s, over vLLM's",
    )
