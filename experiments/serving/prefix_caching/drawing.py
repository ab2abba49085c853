"""Draws hit rates against the size of the pool."""

from typing import Any

from experiments.plotting import style

KINDS = (
    ("depth_first", None, "depth first: the best there is", 3, "-", 1.2),
    ("cached_first", None, "most cached first", 6, "-", 1.2),
    ("fcfs", None, "in order of arrival", 5, "-", 1.2),
    ("fcfs", "fifo", "... first in evicted first", 5, ":", 0.9),
    ("fcfs", "random", "... anyone evicted", 1, ":", 0.9),
)
"""Order, who is evicted, how it is called; colour, line and width."""
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(ax: Any, load: dict[str, Any], rated: Any, *, names: bool) -> None:
    """Draws the servings of a workload; with `names`, says which line is what."""
    distinct, palette, height = load["distinct_pages"], style.colors(), 0.98
    ax.axhline(100 * load["best_share"], color="0.8", linewidth=0.8, zorder=0)
    for order, eviction, label, color, line, width in KINDS:
        runs = rated.curve(load["name"], order, eviction)
        if not len(runs):
            continue
        look: dict[str, Any] = {"color": palette[color], "linewidth": width}
        marker = "" if eviction else "o"
        share = 100 * runs.pool / distinct
        ax.plot(share, 100 * runs.rate, line, marker=marker, **look)
        if names:
            said = {"fontsize": 6, "va": "top", "transform": ax.transAxes}
            ax.text(0.02, height, label, color=palette[color], **said)
            height -= 0.07
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)
    pages = f"{distinct:,} distinct pages\nof {load['page_size']} tokens"
    ax.set(ylim=(0, 100), ylabel="pages found, %", xlabel=f"pool, % of {pages}")
    ax.set_title(f"{load['name']}: {load['requests']:,} prompts", loc="left")
