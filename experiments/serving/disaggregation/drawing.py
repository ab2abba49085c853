"""Draws tails of latency, goodput, what links decide, and queues beside formulas."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.published import goodputs
from experiments.serving.disaggregation.queues import (
    MACHINES,
    SERVICE_S,
    SPEED_UP,
    formula_s,
)
from experiments.serving.disaggregation.runs import Loads, each
from experiments.serving.disaggregation.settings import EXAMPLE, KNOWN

GREY = "0.55"
LOOKS = {"both": ("both phases", 6), "prefill": ("prompts alone", 1)}
LOOKS |= {"decode": ("decoding alone", 3), "split": ("split", 5)}


def draw(axes: Any, result: Any) -> None:
    """Draws six panels."""
    alone, split = (x.where(name=EXAMPLE) for x in (result.alone, result.split))
    goal, one = KNOWN[EXAMPLE].objectives, {x: alone.where(role=x) for x in LOOKS}
    first = [one["both"], one["prefill"], split]
    _draw_tail(axes[0, 0], "ttft_s", first, goal.first_s)
    between = [one["both"], one["decode"], split]
    _draw_tail(axes[0, 1], "tpot_s", between, goal.per_token_s)
    axes[0, 0].set(title="OPT-13B, 512 + 64 tokens", ylabel="first token, P90, s")
    label = "per output token, P90, s"
    axes[0, 1].set(title="the same, between tokens", ylabel=label)
    _draw_attained(axes[0, 2], [one["both"], split])
    _draw_goodput(axes[1, 0], goodputs(result))
    _draw_links(axes[1, 1], result.links, split)
    _draw_queues(axes[1, 2], result.queues)


def _look(loads: Loads) -> dict[str, Any]:
    label, color = LOOKS[loads.distinct("role")[0]]
    return {"color": style.colors()[color], "label": label}


def _draw_tail(ax: Any, field: str, lines: list[Loads], goal: float) -> None:
    for loads in filter(len, lines):
        values = getattr(loads, field)
        values = np.where(np.isfinite(values), values, np.nan)
        ax.plot(loads.rate_per_card, values, "o-", **_look(loads))
    ax.axhline(goal, color=GREY, linewidth=0.8, linestyle=":")
    ax.set(xlabel="requests/s for each GPU", ylim=(0, 3 * goal))
    ax.set_xlim(left=0)
    ax.legend()


def _draw_attained(ax: Any, lines: list[Loads]) -> None:
    for loads in filter(len, lines):
        look, rate = _look(loads), loads.rate_per_card
        ax.plot(rate, 100 * loads.attained, "o-", **look)
        thin: dict[str, Any] = {"color": look["color"], "linewidth": 0.8}
        ax.plot(rate, 100 * loads.attained_first, ":", **thin)
        ax.plot(rate, 100 * loads.attained_gap, "--", **thin)
    ax.axhline(90, color=GREY, linewidth=0.8, linestyle=":")
    ax.set(
        title="objectives kept (dotted: first; dashed: between)",
        xlabel="requests/s for each GPU (split: 2 read and 1 decodes)",
        ylabel="% of requests",
    )
    ax.set_xlim(left=0)
    ax.legend(loc="lower left")


def _draw_goodput(ax: Any, rows: list[dict[str, Any]]) -> None:
    colors = style.colors()
    for i, row in enumerate(rows):
        together, apart = row["together_per_card_per_s"], row["split_per_card_per_s"]
        base = together if together > 0 else np.nan
        for dx, value, color in ((-0.2, together, colors[6]), (0.2, apart, colors[5])):
            bar = ax.bar(i + dx, value / base, 0.36, color=color)
            if np.isfinite(value / base):
                ax.bar_label(bar, [f"{value:.2g}"], fontsize=5)
        for ratio in {*KNOWN[row["name"]].ratio}:
            ax.plot([i + 0.2], [ratio], "D", color=GREY, markersize=3)
    ax.set_xticks(range(len(rows)), [x["name"].replace(", ", "\n") for x in rows])
    ax.tick_params("x", labelsize=6)
    ax.set(
        title="goodput, together and split (grey: published)",
        ylabel="requests/s for each GPU, relative",
    )


def _draw_links(ax: Any, links: Loads, split: Loads) -> None:
    speeds = {
        link / 1e9: each(links.where(link=link)) for link in links.distinct("link")
    }
    if len(split):
        speeds[settings.LINK / 1e9] = each(split)
    ax.plot([*speeds], [*speeds.values()], "o-", color=style.colors()[5])
    ax.set(
        title="how fast keys and values must cross over",
        xlabel="link from GPU to GPU, GB/s",
        ylabel="requests/s for each GPU",
        xscale="log",
    )
    ax.set_ylim(bottom=0)


def _draw_queues(ax: Any, queues: Any) -> None:
    colors, speed_ups = style.colors(), (1, SPEED_UP, 2)
    for i, (machine, speed_up) in enumerate(zip(MACHINES, speed_ups, strict=True)):
        color = colors[(6, 5, 3)[i]]
        rates = np.linspace(0.01, 0.93, 200) * speed_up / SERVICE_S
        exact = [formula_s(machine, rate) for rate in rates]
        ax.plot(rates, exact, color=color, linewidth=0.8, label=machine)
        ax.plot(queues.rate, queues.simulated_s[i], "o", color=color)
    ax.set(
        title="M/D/1: formulas, and simulated (dots)",
        xlabel="requests/s",
        ylabel="mean time to the first token, s",
        ylim=(0, 0.45),
    )
    ax.legend(loc="upper left")
