"""Draws tails of latency, goodput, what links decide, and queues beside formulas."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.published import EXAMPLE, each, goodputs
from experiments.serving.disaggregation.queues import (
    MACHINES,
    SERVICE_S,
    SPEED_UP,
    formula_s,
)
from experiments.serving.disaggregation.runs import Loads

GREY = "0.55"
SMALL: dict[str, Any] = {"fontsize": 6}
TOGETHER, READS, DECODES, SPLIT = (
    "both phases",
    "prompts alone",
    "decoding alone",
    "split",
)


def draw(axes: Any, result: Any) -> None:
    """Draws six panels."""
    alone = result.alone.where(name=EXAMPLE)
    split = result.split.where(name=EXAMPLE)
    goal = settings.EXAMPLE_OBJECTIVES
    both = (alone.where(role="both"), TOGETHER)
    _draw_tail(
        axes[0, 0],
        "ttft_s",
        [both, (alone.where(role="prefill"), READS), (split, SPLIT)],
        goal.first_s,
        "first token, P90, s",
    )
    _draw_tail(
        axes[0, 1],
        "tpot_s",
        [both, (alone.where(role="decode"), DECODES), (split, SPLIT)],
        goal.per_token_s,
        "per output token, P90, s",
    )
    axes[0, 0].set_title("OPT-13B, 512 + 64 tokens", loc="left")
    axes[0, 1].set_title("the same, between tokens", loc="left")
    _draw_attained(axes[0, 2], both[0], split)
    _draw_goodput(axes[1, 0], result)
    _draw_links(axes[1, 1], result.links, split)
    _draw_queues(axes[1, 2], result.queues)


def _colors() -> dict[str, Any]:
    colors = style.colors()
    names = (TOGETHER, READS, DECODES, SPLIT)
    return dict(zip(names, (colors[6], colors[1], colors[3], colors[5]), strict=True))


def _draw_tail(
    ax: Any, field: str, lines: list[tuple[Loads, str]], goal: float, label: str
) -> None:
    colors = _colors()
    for loads, name in lines:
        values = getattr(loads, field)
        values = np.where(np.isfinite(values), values, np.nan)
        ax.plot(loads.rate_per_card, values, "o-", color=colors[name], label=name)
    ax.axhline(goal, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_xlabel("requests/s for each card")
    ax.set_ylabel(label)
    ax.set_ylim(0, 3 * goal)
    ax.set_xlim(left=0)
    ax.legend(fontsize=6)


def _draw_attained(ax: Any, both: Loads, split: Loads) -> None:
    colors = _colors()
    for loads, name in ((both, TOGETHER), (split, f"{SPLIT}, 2 read and 1 decodes")):
        color = colors[name.partition(",")[0]]
        rate = loads.rate_per_card
        ax.plot(rate, 100 * loads.attained, "o-", color=color, label=name)
        ax.plot(rate, 100 * loads.attained_first, ":", color=color, linewidth=0.8)
        ax.plot(rate, 100 * loads.attained_gap, "--", color=color, linewidth=0.8)
    ax.axhline(90, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_title("objectives kept (dotted: first; dashed: between)", loc="left")
    ax.set_xlabel("requests/s for each card")
    ax.set_ylabel("% of requests")
    ax.set_xlim(left=0)
    ax.legend(fontsize=6, loc="lower left")


def _draw_goodput(ax: Any, result: Any) -> None:
    colors = _colors()
    rows = goodputs(result)
    for i, row in enumerate(rows):
        together, apart = row["together_per_card_per_s"], row["split_per_card_per_s"]
        base = together if together > 0 else np.nan
        ax.bar(i - 0.2, together / base, 0.36, color=colors[TOGETHER])
        ax.bar(i + 0.2, apart / base, 0.36, color=colors[SPLIT])
        for place, value in ((i - 0.2, together), (i + 0.2, apart)):
            look = {"ha": "center", "va": "bottom", "fontsize": 5}
            if np.isfinite(value / base):
                ax.text(place, value / base, f"{value:.2g}", **look)
        if row["name"] in settings.APPLICATIONS:
            for ratio in set(settings.APPLICATIONS[row["name"]].ratio):
                ax.plot([i + 0.2], [ratio], "D", color=GREY, markersize=3)
        elif row["name"] == EXAMPLE:
            ax.plot([i + 0.2], [2.1], "D", color=GREY, markersize=3)
    ax.set_xticks(
        range(len(rows)), [x["name"].replace(", ", "\n") for x in rows], fontsize=6
    )
    ax.set_ylabel("requests/s for each card, relative")
    ax.set_title("goodput, together and split (grey: published)", loc="left")


def _draw_links(ax: Any, links: Loads, split: Loads) -> None:
    color = _colors()[SPLIT]
    speeds = list(dict.fromkeys(links.link.tolist()))
    values = [each(links.where(link=link)) for link in speeds]
    if split.rate.size:
        speeds.append(settings.LINK)
        values.append(each(split))
    ax.plot(np.array(speeds) / 1e9, values, "o-", color=color)
    ax.set_xscale("log")
    ax.set_xlabel("link from card to card, GB/s")
    ax.set_ylabel("requests/s for each card")
    ax.set_ylim(bottom=0)
    ax.set_title("how fast keys and values must cross over", loc="left")


def _draw_queues(ax: Any, queues: Any) -> None:
    colors = style.colors()
    tops = {
        "one": 1 / SERVICE_S,
        "two tensor ways": SPEED_UP / SERVICE_S,
        "two pipeline stages": 2 / SERVICE_S,
    }
    for i, machine in enumerate(MACHINES):
        color = colors[(6, 5, 3)[i]]
        rates = np.linspace(0.01, 0.93, 200) * tops[machine]
        exact = [formula_s(machine, rate) for rate in rates]
        ax.plot(rates, exact, color=color, linewidth=0.8, label=machine)
        ax.plot(queues.rate, queues.simulated_s[i], "o", color=color)
    ax.set_ylim(0, 0.45)
    ax.set_xlabel("requests/s")
    ax.set_ylabel("mean time to the first token, s")
    ax.set_title("M/D/1: formulas, and simulated (dots)", loc="left")
    ax.legend(fontsize=6, loc="upper left")
