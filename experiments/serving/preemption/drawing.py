"""Draws what giving way costs: in tokens, in steps and in seconds."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.preemption.moving import Moves
from experiments.serving.preemption.published import WATERMARKS
from experiments.serving.preemption.results import Result
from experiments.serving.preemption.serving import Servings

GREY, INK = "0.55", "0.15"
PALE = "#cfe3f1"


def draw(axes: Any, result: Result) -> None:
    """Draws four panels; those of parts that were not served stay empty."""
    _draw_ways(axes[0, 0], result.ways)
    _draw_watermarks(axes[0, 1], result.watermarks, result.victims)
    _draw_spaces(axes[1, 0], result.spaces, result.hosts)
    _draw_moves(axes[1, 1], result.moves)


def _draw_ways(ax: Any, ways: Servings) -> None:
    """Tokens computed once and again, a bar each way, with steps and seconds."""
    colors = style.colors()
    ax.set_title("the same requests in too small a pool", loc="left")
    ax.set_xlabel("tokens computed, thousands")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    place = np.arange(len(ways.name))
    again = ways.num_recomputed / 1000
    once = ways.num_fed / 1000 - again
    ax.barh(place, once, 0.55, color=PALE)
    ax.barh(place, again, 0.55, left=once, color=colors[6])
    ax.set_yticks(place, [name.replace(", ", ",\n") for name in ways.name.tolist()])
    ax.invert_yaxis()
    small = {"fontsize": 6, "va": "center"}
    for i in place:
        seconds = np.median(ways.duration_s[i])
        text = f"{ways.steps[i]:,} steps, {seconds:.1f} s"
        ax.text(0.15, i, text, color=INK, **small)
        if again[i]:
            share = f"{100 * ways.recomputed_share[i]:.0f} % again"
            end = 1.01 * (once[i] + again[i])
            ax.text(end, i, share, color=colors[6], **small)
    ax.margins(x=0.12)


def _draw_watermarks(ax: Any, watermarks: Servings, victims: Servings) -> None:
    """Recomputed share against pages kept free; at none, every rule of victims."""
    colors = style.colors()
    ax.set_title("pages kept free at admission, recomputing", loc="left")
    ax.set_xlabel("kept free, % of the pool")
    ax.set_ylabel("computed again, % of all tokens")
    theirs = [(100 * x, 100 * y) for x, y in WATERMARKS.items()]
    ax.plot(*zip(*theirs, strict=True), "D:", color=GREY, linewidth=0.8)
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6}
    at = {"xytext": (5, 3), "color": GREY}
    ax.annotate("simulation, ShareGPT", theirs[-1], **at, **look)
    if watermarks.name.size:
        x = 100 * watermarks.watermark / watermarks.pool_pages
        y = 100 * watermarks.recomputed_share
        ax.plot(x, y, "o-", color=colors[5])
        for i, steps in enumerate(watermarks.steps.tolist()):
            label = f"{steps:,} steps" if i in (0, len(x) - 1) else f"{steps:,}"
            at = {"xytext": (5, 1), "color": colors[5]}
            ax.annotate(label, (x[i], y[i]), **at, **look)
        ax.set_ylim(0, max(1.12 * y.max(), 15))
        ax.set_xlim(-4, 1.18 * max(x.max(), 1))
    again = victims.preemption == "recompute"
    if again.any():
        y = 100 * victims.recomputed_share[again]
        ax.plot(np.zeros(len(y)), y, "_", color=colors[6], markersize=7)
        best = victims.victim[again][y.argmin()].replace("_", " ")
        text = f"other victims, best: {best}"
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": colors[6]}
        at = {"xytext": (45, -2), "color": colors[6], "arrowprops": line}
        ax.annotate(text, (0, y.min()), **at, **look)


def _draw_spaces(ax: Any, spaces: Servings, hosts: Servings) -> None:
    """Recomputed share against swap space, and with the host's memory beside it."""
    colors = style.colors()
    ax.set_title("swapping with too little room", loc="left")
    ax.set_xlabel("pages of the buffer, % of the pool")
    ax.set_ylabel("computed again, % of all tokens")
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6}
    if spaces.name.size:
        x = 100 * spaces.swap_pages / spaces.pool_pages
        y = 100 * spaces.recomputed_share
        ax.plot(x, y, "o-", color=colors[5])
        for i, (lost, all_) in enumerate(
            zip(spaces.num_fallbacks, spaces.num_preempted, strict=True)
        ):
            label = f"{lost} of {all_}" + (" found no room" if i == 0 else "")
            at = {"xytext": (5, 4), "color": colors[5]}
            ax.annotate(label, (x[i], y[i]), **at, **look)
    some = hosts.host_pages > 0
    if some.any():
        x = 100 * (hosts.swap_pages / hosts.pool_pages)[some]
        y = 100 * hosts.recomputed_share[some]
        ax.plot(x, y, "s", color=colors[3], markersize=4)
        text = " or ".join(f"{num:,}" for num in hosts.host_pages[some].tolist())
        text = f"with the host:\n+ {text} pages".replace(" or ", "\nor ")
        at = {"xytext": (-5, 0), "ha": "right", "va": "center", "color": colors[3]}
        ax.annotate(text, (x[0], y.mean()), **at, **look)
    top = 100 * spaces.recomputed_share.max(initial=0.0)
    ax.set_ylim(0, max(1.12 * top, 1))
    ax.set_xlim(-20, 116)
    ax.set_xticks(range(0, 101, 25))


def _draw_moves(ax: Any, moves: Moves) -> None:
    """Time to bring one request back, against the page size."""
    colors = style.colors()
    ax.set_title("bringing one request back", loc="left")
    ax.set_xlabel("page size, tokens")
    ax.set_ylabel("time, ms")
    if not moves.page_size.size:
        return
    ax.set_title(f"bringing back {moves.num_tokens[0]:,} tokens", loc="left")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lines = {
        "recompute": (moves.recompute, colors[6]),
        "swap, through\nhost memory": (moves.swap_through_host, colors[3]),
        "swap, buffer\nbeside the pool": (moves.swap, colors[5]),
    }
    for label, (times_s, color) in lines.items():
        ax.plot(moves.page_size, 1000 * times_s, "o-", color=color)
        look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6}
        end = (moves.page_size[-1], 1000 * times_s[-1])
        at = {"xytext": (5, 0), "va": "center", "color": color}
        ax.annotate(label, end, **at, **look)
    sizes = moves.page_size.tolist()
    if sizes[0] == 1:
        slow = 1000 * moves.swap_through_host[0]
        at = {"xytext": (24, -34), "color": GREY}
        ax.annotate("pages of 1: XLA\ncopies the whole pool", (1, slow), **at, **look)
    ax.set_xlim(0.8 * sizes[0], 6 * sizes[-1])
    ax.set_xticks(moves.page_size, [str(size) for size in moves.page_size])
    ax.minorticks_off()
