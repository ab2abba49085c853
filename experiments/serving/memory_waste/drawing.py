"""Draws figures 1 and 2 of the PagedAttention paper from simulated runs."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import lab
from experiments.serving.latency_vs_rate import published, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.serving.memory_waste.experiment import Result

CLAIMS = lab.claims_file(__file__)
FIGURE_BATCHES = published.FIGURE_BATCHES["12a"]
"""Batch sizes: figure 13a."""
SYSTEMS = settings.SYSTEMS[1:]
"""Systems with continuous batching."""
USES = {
    "tokens": "token states",
    "reserved": "reservation",
    "internal": "internal waste",
    "external": "external waste and rest",
}
"""Uses of token places by column, with labels: hold K and V, reserved for later tokens,
reserved in vain, and the remainder."""


USE_LOOKS = (
    *((lab.GREEN, ""), (lab.SKY, "//")),
    *((lab.ORANGE, ".."), (lab.RED, "\\\\")),
)
"""Colour and hatch of the uses."""


def plot(axes: np.ndarray, result: "Result") -> None:
    """Draws memory by part, uses of token places, growth of memory, and throughput."""
    weights = result.weight_bytes / 1e9
    places = result.kv_bytes / 1e9
    ax = axes[0][0]
    memory = result.memory_bytes / 1e9
    names = ("parameters", "keys and values", "rest")
    sizes = (weights, places, memory - weights - places)
    colors = [(0.6, 0.6, 0.6), lab.colors()[lab.BLUE], (0.8, 0.8, 0.8)]
    labels = [f"{size:.1f} GB\n{100 * size / memory:.0f} %" for size in sizes]
    ax.bar_label(ax.bar(names, sizes, 0.6, color=colors), labels, padding=2)
    ax.margins(y=0.2)
    title = f"OPT-13B leaves {places:.0f} of {memory:.0f} GB to keys and values"
    lab.set_labels(ax, title, "", "memory of an A100 [GB]")
    _draw_uses(axes[0][1], result)
    ax = axes[1][0]
    full = weights + places
    lab.draw_reference_line(ax, full, "all memory for keys and values")
    ends = _draw_lines(ax, result, result.growth.memory_bytes / 1e9, says_end=False)
    title = f"Pages fit {ends['paged'][0]} requests, Orca (Oracle) "
    title += f"{ends['Orca (Oracle)'][0]}, Orca (Max) {ends['Orca (Max)'][0]}"
    ax.set(ylim=(weights - 1, full + 2), ylabel="memory [GB]", title=title)
    ax.legend()
    rates = result.growth.tokens_per_s
    ends = _draw_lines(axes[1][1], result, rates, says_end=True)
    title = (
        f"Pages fit {ends['paged'][0] / ends['Orca (Max)'][0]:.1f} times the requests"
    )
    title += (
        f" of Orca (Max): {ends['paged'][1] / ends['Orca (Max)'][1]:.1f} times the rate"
    )
    axes[1][1].set(ylabel="throughput [tokens/s]", title=title)
    axes[1][1].set_ylim(bottom=0)
    axes[1][1].legend()


def _draw_uses(ax: "Axes", result: "Result") -> None:
    """Draws simulated shares left and published shares right in each pair of bars."""
    names = result.system.tolist()
    printed = CLAIMS.published("uses")
    reference = [
        [printed[name].get(use, 0.0) for use in USES.values()] for name in names
    ]
    ours = 100 * result.waste.uses.mean(axis=1)
    places = np.arange(len(names))
    for shares, shift, alpha in ((ours, -0.21, 1.0), (np.array(reference), 0.21, 0.5)):
        bottom = np.zeros(len(names))
        rows = zip(shares.T, USES.values(), USE_LOOKS, strict=True)
        for values, use, (color, hatch) in rows:
            look: dict[str, Any] = {"color": lab.colors()[color], "hatch": hatch}
            look |= {"alpha": alpha, "bottom": bottom, "edgecolor": "white"}
            bars = ax.bar(places + shift, values, 0.4, **look)
            if alpha == 1.0:
                bars.set_label(use)
            bottom = bottom + values
    ax.set_xticks(places, [x.replace("Orca ", "Orca\n") for x in names])
    waste = 100 - dict(zip(names, ours[:, 0], strict=True))["Orca (Max)"]
    paged = 100 - dict(zip(names, ours[:, 0], strict=True))["paged"]
    title = f"Orca (Max) wastes {waste:.0f} % of its token places, pages {paged:.0f} %"
    lab.set_labels(ax, title, "left: ours, right: the paper's", "token places [%]")
    ax.set_ylim(0, 100)
    ax.legend()


def _draw_lines(
    ax: "Axes", result: "Result", values: np.ndarray, *, says_end: bool
) -> dict[str, tuple[int, float]]:
    """Draws lines up to the last request that fits; returns their end points."""
    requests = result.growth.requests
    ends = {}
    for name, line in zip(result.system.tolist(), values, strict=True):
        last = np.flatnonzero(np.isfinite(line))[-1]
        end = ends[name] = int(requests[last]), float(line[last])
        if not says_end:
            lab.draw_curve(ax, requests, line, name, marker="")
        elif name == "paged":
            lab.draw_curve(ax, requests, line, name, marker="", zorder=0)
        look = {"linestyle": "", "markersize": 8}
        lab.draw_curve(ax, *([x] for x in end), name, name, **look)
        if says_end:
            offset, side = ((6, -4), "left") if name != "paged" else ((-8, 0), "right")
            look = {"va": "top", "ha": side}
            lab.annotate(ax, f"{end[1]:.0f} tokens/s", end, offset, **look)
    ax.set(xlim=(0, 1.08 * requests[-1]), xlabel="batch [requests]")
    return ends
