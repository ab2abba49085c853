"""The picture of a kernel benchmark: a roofline, and how near each call comes to it."""

import itertools
from typing import Any

import numpy as np
from matplotlib.ticker import NullFormatter

from experiments.framework import units
from pallas_kernels.bench import Ceilings

OURS = {
    "reference": {"marker": "s", "color": "C1"},
    "mosaic_gpu": {"marker": "o", "color": "C5"},
}
"""How ours look; peers are crosses."""
PEER_COLORS = ("C2", "C3", "C6", "C7", "0.4")


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws operations per second over operations per byte, then shares of the floor.

    Args:
      axes: two of them.
      result: of the benchmark; without rows nothing but frames is drawn.
    """
    if not result:
        return
    head, *rows = result
    ceilings = Ceilings(**head["ceilings"])
    timed = [row for row in rows if row["seconds"]]
    names = list(dict.fromkeys(row["implementation"] for row in timed))
    roof, shares = axes
    _draw_roof(roof, ceilings, [row for row in timed if row["flops"]])
    peers = [name for name in names if name not in OURS]
    colors = dict(zip(peers, itertools.cycle(PEER_COLORS), strict=False))
    for name in names:
        mine = [row for row in timed if row["implementation"] == name]
        look: dict[str, Any] = {"linestyle": "", "alpha": 0.85, "label": name}
        look |= OURS.get(name) or {"marker": "x", "color": colors[name]}
        seconds = np.asarray([row["seconds"] for row in mine])
        flops = np.asarray([row["flops"] for row in mine], float)
        moved = np.asarray([row["bytes"] for row in mine], float)
        does = flops > 0
        roof.plot(flops[does] / moved[does], flops[does] / seconds[does], **look)
        shares.plot(moved, [100 * row["fraction"] for row in mine], **look)
    shares.set_xscale("log")
    shares.xaxis.set_minor_formatter(NullFormatter())
    shares.set_xlabel("bytes to be moved")
    shares.set_ylim(bottom=0)
    shares.set_title("share of the floor [%]", loc="left")
    shares.axhline(100, color="0.75", linewidth=0.6, zorder=0)
    if names:
        shares.legend(fontsize=6, handletextpad=0.2)


def _draw_roof(ax: Any, ceilings: Ceilings, rows: list[dict[str, Any]]) -> None:
    """Draws what the device was seen to reach."""
    bytes_per_s = max(ceilings.copy_bytes_per_s, ceilings.read_bytes_per_s)
    ridge = ceilings.flops_per_s / bytes_per_s
    ratios = [row["flops"] / row["bytes"] for row in rows] or [ridge]
    low, high = min([*ratios, ridge]) / 2, max([*ratios, ridge]) * 3
    xs = np.asarray([low, ridge, high])
    roof = np.minimum(xs * bytes_per_s, ceilings.flops_per_s)
    ax.loglog(xs, roof, color="0.55", linewidth=0.8)
    place = {"fontsize": 6, "color": "0.4", "textcoords": "offset points"}
    ax.annotate(
        units.flops(ceilings.flops_per_s) + "/s",
        *((high, roof[2]), (0, 2)),
        **place,
        ha="right",
    )
    ax.annotate(
        f"{units.size(bytes_per_s)}/s", *((low, roof[0]), (8, -3)), **place, ha="left"
    )
    ax.set_xlabel("operations per byte")
    ax.set_title("operations per second [FLOP/s]", loc="left")
