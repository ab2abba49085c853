"""Draws hit rates against the size of the pool."""

from typing import Any

from experiments.plotting import style
from experiments.serving.prefix_caching.results import Loads, Runs, curve

SIZE_INCHES = (7.2, 2.5)
GREY = "0.55"

_KINDS = (
    ("depth_first", None, "depth first: the best there is", 3, "-", 1.2),
    ("cached_first", None, "most cached first", 6, "-", 1.2),
    ("fcfs", None, "in order of arrival", 5, "-", 1.2),
    ("fcfs", "fifo", "... first in evicted first", 5, ":", 0.9),
    ("fcfs", "random", "... anyone evicted", 1, ":", 0.9),
)
"""Order, who is evicted, how it is called; colour, line and width."""
_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(ax: Any, loads: Loads, runs: Runs) -> None:
    """Draws a chart for each workload; `ax` gives way to them."""
    grid = ax.get_subplotspec().subgridspec(1, max(1, len(loads.name)))
    figure = ax.figure
    ax.remove()
    for i in range(len(loads.name)):
        _draw_load(figure.add_subplot(grid[0, i]), loads, runs, i)


def _draw_load(ax: Any, loads: Loads, runs: Runs, i: int) -> None:
    distinct, palette = int(loads.num_distinct[i]), style.colors()
    ax.axhline(100 * loads.best[i], color="0.8", linewidth=0.8, zorder=0)
    height = 0.98
    for order, eviction, label, color, line, width in _KINDS:
        points = curve(loads, runs, i, order, eviction)
        if not points.pool.size:
            continue
        look: dict[str, Any] = {"color": palette[color], "linewidth": width}
        share = 100 * points.pool / distinct
        marker = "o" if eviction is None else ""
        ax.plot(share, 100 * points.rate, line, marker=marker, **look)
        if not i:  # the others have the same
            said = {"fontsize": 6, "va": "top", "transform": ax.transAxes}
            ax.text(0.02, height, label, color=palette[color], **said)
            height -= 0.07
    ax.set_xscale("log")
    ticks = [tick for tick in _TICKS if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_ylim(0, 100)
    ax.set_ylabel("pages found, %")
    pages = f"{distinct:,} distinct pages\nof {loads.page_size[i]} tokens"
    ax.set_xlabel(f"pool, % of {pages}")
    ax.set_title(f"{loads.name[i]}: {loads.num_requests[i]:,} prompts", loc="left")
