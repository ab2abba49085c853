"""Draws stalls, what a budget costs, tails against rates, and capacities."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.chunked_prefill import settings
from experiments.serving.chunked_prefill.published import RATIOS, capacities
from experiments.serving.chunked_prefill.runs import PATIENTS, Loads, Timeline

GREY, INK = "0.55", "0.15"
SMALL: dict[str, Any] = {"fontsize": 6}


def draw(axes: Any, result: Any) -> None:
    """Draws four panels."""
    _draw_timeline(axes[0, 0], result.timeline)
    _draw_budgets(axes[0, 1], result.budgets)
    _draw_loads(axes[1, 0], result.loads)
    _draw_capacities(axes[1, 1], result.loads)


def _colors() -> dict[str, Any]:
    colors = style.colors()
    return dict(zip(("Orca", "vLLM"), (colors[1], colors[6]), strict=True)) | {
        settings.both(512).name: colors[5],
        settings.both(2048).name: colors[3],
    }


def _draw_timeline(ax: Any, timeline: Timeline) -> None:
    """A tick for each token; every way has a line for each sequence."""
    colors = style.colors()
    ax.set_title("two long prompts come while three are answered", loc="left")
    names = list(dict.fromkeys(timeline.way.tolist()))
    last = 0.0
    for i, name in enumerate(names):
        mine = timeline.way == name
        longest = 0.0
        for sequence in range(timeline.sequence.max() + 1):
            at = timeline.time_s[mine & (timeline.sequence == sequence)]
            is_late = sequence >= PATIENTS
            y = i + 0.13 * sequence - 0.26
            look: dict[str, Any] = {"markersize": 3, "markeredgewidth": 0.5}
            ax.plot(at, np.full(len(at), y), "|", color=colors[1 + 4 * is_late], **look)
            last = max(last, at.max())
            if not is_late:
                longest = max(longest, np.diff(at).max())
        ax.text(last * 1.02, i, f"{1000 * longest:,.0f} ms", va="center", **SMALL)
    ax.text(last * 1.02, -0.55, "longest stall", color=GREY, **SMALL)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.75)
    ax.set_xlim(0, 1.22 * last)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("time, s (a tick is a token; blue: those who came late)")


def _draw_budgets(ax: Any, budgets: Loads) -> None:
    colors = style.colors()
    ax.set_title("chunks, mixed: what the token budget decides", loc="left")
    ax.set_xlabel("tokens a step")
    ax.set_ylabel("time, s")
    lines = {
        "first token, median": (budgets.ttft_s, colors[5]),
        "between tokens, P99": (budgets.tbt_p99_s, colors[6]),
        "between tokens, median": (budgets.tbt_p50_s, colors[3]),
    }
    for label, (values, color) in lines.items():
        ax.plot(budgets.budget, values, "o-", color=color, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    strict = settings.MODELS[str(budgets.model[0])].strict_s
    ax.axhline(strict, color=GREY, linewidth=0.8, linestyle=":")
    ax.text(budgets.budget[0], strict * 1.05, "strict objective", color=GREY, **SMALL)
    ax.legend(fontsize=6, loc="best")


def _draw_loads(ax: Any, loads: Loads) -> None:
    """The first model and data: the tail between tokens against the rate."""
    if not loads.rate.size:
        return
    model, data = str(loads.model[0]), str(loads.data[0])
    ax.set_title(f"{model}, {data}: tail between tokens", loc="left")
    ax.set_xlabel("requests/s")
    ax.set_ylabel("P99 time between tokens, s")
    for system, color in _colors().items():
        mine = (loads.system == system) & (loads.model == model) & (loads.data == data)
        ax.plot(
            loads.rate[mine], loads.tbt_p99_s[mine], "o-", color=color, label=system
        )
    found = settings.MODELS[model]
    for limit, name in ((found.strict_s, "strict"), (found.relaxed_s, "relaxed")):
        ax.axhline(limit, color=GREY, linewidth=0.8, linestyle=":")
        ax.text(0.02, limit * 1.06, name, color=GREY, **SMALL)
    ax.set_yscale("log")
    ax.set_xlim(left=0)
    ax.legend(fontsize=6, loc="lower right")


def _draw_capacities(ax: Any, loads: Loads) -> None:
    """Bars for each case, over vLLM's; absolute rates at their ends."""
    ax.set_title("load borne within the objective (grey: published)", loc="left")
    ax.set_ylabel("requests/s, over vLLM's")
    rows = capacities(loads)
    cases = list(dict.fromkeys((x["model"], x["data"]) for x in rows))
    groups = [(*case, kind) for case in cases for kind in ("strict", "relaxed")]
    colors, width = _colors(), 0.2
    top = 1.0
    for i, (model, data, kind) in enumerate(groups):
        here = {
            x["system"]: x[f"{kind}_per_s"]
            for x in rows
            if (x["model"], x["data"]) == (model, data)
        }
        base = max(here.get("vLLM", 0.0), 1e-9)
        for k, (system, color) in enumerate(colors.items()):
            height = here.get(system, 0.0) / base
            if not 0 < height < 100:
                continue
            top = max(top, height)
            place = i + (k - 1.5) * width
            ax.bar(place, height, width * 0.9, color=color)
            look = {"ha": "center", "va": "bottom", "fontsize": 4.5, "rotation": 90}
            ax.text(place, height * 1.02, f" {here[system]:.2g}", color=color, **look)
            for x in RATIOS:
                case = (x.model, x.data, x.objective, x.rival, x.system)
                if case == (*groups[i], "vLLM", system):
                    ax.plot([place], [x.published], "D", color=GREY, markersize=3)
    labels = [f"{m.split('-')[0]}\n{d}\n{k}" for m, d, k in groups]
    ax.set_xticks(range(len(groups)), labels, fontsize=5)
    ax.set_ylim(0, 1.25 * top)
    ax.axhline(1, color=GREY, linewidth=0.6)
