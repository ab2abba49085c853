"""The picture of batching: the lectures' tables of cells, and the sweeps below."""

from typing import Any

import numpy as np

from experiments.plotting import boxes, style
from experiments.serving.batching import lectures
from experiments.serving.batching.sweeps import SYSTEMS, Latencies, Result, Speeds

PUBLISHED = {"continuous": 8 / 4, "paged": 23 / 4}
"""Throughput over that of FasterTransformer's static batching, outputs up to 1,536."""
LONGEST = 1536
LABELS = {
    "static": "static",
    "continuous": "continuous",
    "paged": "continuous, paged",
}
WAITS, HELD = "0.88", "0.6"


def draw(axes: Any, result: Result) -> None:
    """Draws all panels on 4 rows of 2 axes."""
    r = result
    for ax, found, name in (
        (axes[0, 0], r.static_sequences, "static"),
        (axes[0, 1], r.continuous_sequences, "continuous"),
    ):
        _draw_grid(ax, lectures.grid(found))
        ax.set_title(f"{name} batching: tokens in each slot", loc="left")
    for ax, found, name in (
        (axes[1, 0], r.static_requests, "request by request"),
        (axes[1, 1], r.continuous_requests, "iteration by iteration"),
    ):
        _draw_turns(ax, found, is_static=found is r.static_requests)
        ax.set_title(f"scheduling {name}, three at a time", loc="left")
    if r.limits.value.size:
        _draw_speeds(axes[2, 0], r.limits)
        axes[2, 0].set_title("exponential outputs up to a limit", loc="left")
        _draw_gains(axes[3, 0], r.limits)
        axes[3, 0].set_title("the same, over static batching", loc="left")
        for ax in (axes[2, 0], axes[3, 0]):
            ax.set_xscale("log", base=2)
            ax.set_xticks(r.limits.value)
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.set_xlabel("limit, tokens")
    else:
        axes[2, 0].set_axis_off()
        axes[3, 0].set_axis_off()
    _draw_speeds(axes[2, 1], r.deviations)
    axes[2, 1].set_xlabel("standard deviation of outputs / mean")
    axes[2, 1].set_title(f"equal means, {r.num_slots} slots", loc="left")
    _draw_clients(axes[3, 1], r.clients)


def _looks() -> dict[str, Any]:
    palette = style.colors()
    return dict(zip(SYSTEMS, (palette[6], palette[5], palette[3]), strict=True))


def _fills() -> dict[int, Any]:
    palette = style.colors()
    return {
        lectures.PROMPT: palette[4],
        lectures.TOKEN: boxes.pale(palette[5]),
        lectures.END: palette[6],
    }


def _cell(ax: Any, x: int, y: int, kind: int, text: str, note: str = "") -> None:
    """Draws a cell whose upper left corner is (x, y)."""
    look = {"facecolor": _fills()[kind], "edgecolor": "white"}
    boxes.rectangle(ax, boxes.Box(x, y, 1, 1), **look)
    color = "white" if kind == lectures.END else boxes.INK
    place = {"ha": "center", "va": "center_baseline", "color": color}
    ax.text(x + 0.5, y + 0.5, text, fontsize=6, **place)
    if note:
        place = {"ha": "right", "va": "bottom", "color": color}
        ax.text(x + 0.95, y + 0.97, note, fontsize=4, **place)


def _frame(ax: Any, columns: int, names: list[str], letter: str) -> None:
    ax.set_xlim(0, columns)
    ax.set_ylim(len(names), 0)
    ax.set_xticks([x + 0.5 for x in range(columns)])
    ax.set_xticklabels([f"{letter}{x + 1}" for x in range(columns)])
    ax.set_yticks([y + 0.5 for y in range(len(names))], names)
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def _draw_grid(ax: Any, shown: lectures.Grid) -> None:
    """S1 to S7; the small numbers are iterations."""
    _frame(ax, lectures.PLACES, [f"slot {i + 1}" for i in range(4)], "T")
    for (slot, place), kind in np.ndenumerate(shown.kind):
        if kind == lectures.IDLE:
            continue
        text = "END" if kind == lectures.END else f"S{shown.request[slot, place] + 1}"
        note = "" if kind == lectures.PROMPT else str(shown.step[slot, place])
        _cell(ax, place, slot, int(kind), text, note)


def _draw_turns(ax: Any, found: lectures.Times, *, is_static: bool) -> None:
    """R1 to R5, iteration by iteration."""
    num_steps = int(found.last.max())
    _frame(ax, num_steps, [f"R{i + 1}" for i in range(found.first.size)], "")
    ax.set_xlabel("iteration (hatched: waits; grey: has ended, slot kept)")
    arrival = np.asarray(lectures.requests().arrival)[:, 0]
    for row, (first, last) in enumerate(zip(*found, strict=True)):
        for step in range(1, num_steps + 1):
            x = step - 1
            if first <= step <= last:
                kinds = {int(first): lectures.PROMPT, int(last): lectures.END}
                kind = kinds.get(step, lectures.TOKEN)
                _cell(ax, x, row, kind, "END" if kind == lectures.END else "")
                continue
            box = boxes.Box(x, row, 1, 1)
            batch = found.last[found.first == first]
            if is_static and last < step <= batch.max():
                boxes.rectangle(ax, box, facecolor=HELD, edgecolor="white")
            elif arrival[row] + 1 < step < first or (
                arrival[row] + 1 == step and step < first
            ):
                look = {"facecolor": "white", "edgecolor": WAITS, "hatch": "/////"}
                boxes.rectangle(ax, box, **look)


def _draw_speeds(ax: Any, found: Speeds) -> None:
    looks, means = _looks(), found.means()
    for name, mean, seeds in zip(SYSTEMS, means, found.tokens_per_s, strict=False):
        color = looks[name]
        ax.plot(found.value, mean, marker="o", color=color, label=LABELS[name])
        if seeds.shape[1] > 1:
            band = seeds.min(axis=1), seeds.max(axis=1)
            ax.fill_between(found.value, *band, color=color, alpha=0.2, linewidth=0)
    ax.set_ylim(0)
    ax.set_ylabel("tokens drawn / s")
    ax.legend()


def _draw_gains(ax: Any, found: Speeds) -> None:
    """Speeds over that of static batching, beside what was published of the ends."""
    looks, means = _looks(), found.means()
    for name, mean in zip(SYSTEMS[1:], means[1:], strict=True):
        look = {"marker": "o", "color": looks[name], "label": LABELS[name]}
        ax.plot(found.value, mean / means[0], **look)
        look |= {"marker": "_", "markersize": 9, "linestyle": "", "alpha": 0.6}
        look["label"] = f"published, up to {LONGEST:,}"
        ax.plot([LONGEST], [PUBLISHED[name]], **look)
    ax.axhline(1, color="0.6", linewidth=0.8)
    ax.set_ylim(0)
    ax.set_ylabel("times static batching")
    ax.legend()


def _draw_clients(ax: Any, found: Latencies) -> None:
    color = style.colors()[5]
    ax.plot(1e3 * found.s_per_token, found.tokens_per_s, marker="o", color=color)
    points = zip(*found, strict=True)
    for clients, rate, seconds in points:
        place = {"textcoords": "offset points", "xytext": (4, -5), "fontsize": 6}
        ax.annotate(str(clients), (1e3 * seconds, rate), **place)
    ax.set_xlabel("latency of a token, ms")
    ax.set_ylabel("tokens drawn / s")
    ax.set_yscale("log")
    ax.set_title("requests side by side", loc="left")
