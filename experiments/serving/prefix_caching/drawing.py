"""Draws hit rates against the size of the pool."""

from typing import Any

from experiments.plotting import style

KINDS = (
    ("depth_first", None, "depth first", "depth first"),
    ("cached_first", None, "most cached first", "most cached first"),
    ("fcfs", None, "in order of arrival", "in order of arrival"),
    ("fcfs", "fifo", "in order, first in evicted first", "in order of arrival"),
    ("fcfs", "random", "in order, random eviction", "in order of arrival"),
)
"""Order, rule of eviction, its name, and the system whose colour it has."""
LINES = {None: "-", "fifo": ":", "random": "-."}
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(ax: Any, load: dict[str, Any], rated: Any) -> None:
    """Draws the servings of a workload."""
    distinct, ends = load["distinct_pages"], {}
    style.reference(ax, 100 * load["best_share"], "all that repeats")
    for order, eviction, label, system in KINDS:
        runs = rated.curve(load["name"], order, eviction)
        if not len(runs):
            continue
        look = {"linestyle": LINES[eviction]} | ({"marker": ""} if eviction else {})
        share = 100 * runs.pool / distinct
        style.curve(ax, share, 100 * runs.rate, system, label, **look)
        ends[label] = 100 * float(runs.rate[0])
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)
    title = f"{load['name']}, {load['requests']:,} prompts"
    if ends:
        best = max(ends, key=lambda x: ends[x])
        title += f": {best} finds {ends[best]:.0f} % with the smallest pool"
    x = f"pool [% of {distinct:,} distinct pages of {load['page_size']} tokens]"
    style.titled(ax, title, x, "pages found [%]", ylim=(0, 100))
    ax.legend()
