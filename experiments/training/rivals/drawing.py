"""The figure of `rivals`: curves by compute, loss by place, ratios, differences."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.plotting import style
from experiments.training.rivals import fits

if TYPE_CHECKING:
    from experiments.training.rivals.outcomes import Result


def plot(axes: Any, result: "Result") -> None:
    """Draws a result on two rows of two axes, under one legend."""
    _draw_curves(axes[0, 0], result)
    _draw_places(axes[0, 1], result)
    _draw_ratios(axes[1, 0], result)
    _draw_differences(axes[1, 1], result)
    lines = axes[0, 1].get_lines()[: len(result.sides)]
    axes[0, 0].figure.legend(
        *(lines, [str(name) for name in result.sides]),
        ncols=4,
        loc="outside upper center",
    )


def _look(side: int) -> dict[str, Any]:
    """Black and wide for the reference, wide for its first rival, dashed past seven."""
    colors = style.colors()
    # Yellow, too light for a line, is left out.
    usable = [colors[0], colors[6], colors[5], colors[3], colors[1], colors[7]]
    return {
        "color": (*usable, colors[2])[side % 7],
        "linestyle": "-" if side < 7 else "--",
        "linewidth": 1.4 if side < 2 else 0.8,
    }


def _draw_curves(ax: Any, result: "Result") -> None:
    """Every finished run, small; those of a side's frontier large, with its curve."""
    from matplotlib import ticker

    runs = result.runs
    for i in range(len(result.sides)):
        mine, look, strong = runs.side == i, _look(i), i < 2
        flops, loss = runs.flops[mine], runs.loss[mine]
        best = fits.frontier(flops, loss)
        if strong:
            ax.plot(flops, loss, "o", color=look["color"], markersize=1.2)
        size = 3.5 if strong else 2
        ax.plot(flops[best], loss[best], "o", color=look["color"], markersize=size)
        ax.plot(result.curves.flops[i], result.curves.loss[i], **look)
    ax.set(xscale="log", xlabel="training compute, exact [FLOP]")
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
    wide = (np.inf, np.inf)
    ax.xaxis.set_major_formatter(ticker.LogFormatterSciNotation(minor_thresholds=wide))
    ax.tick_params(axis="x", which="minor", labelbottom=False)
    ax.set_ylabel("held-out loss [nats per byte]")
    ax.set_title("best runs by compute, and a curve", loc="left")


def _draw_places(ax: Any, result: "Result") -> None:
    for i in range(len(result.sides)):
        ax.plot(result.places.place, result.places.loss[i], **_look(i))
    ax.axvline(100, color="0.8", linewidth=0.6, zorder=0)
    ax.set(xscale="log", xlabel="bytes seen before and with the place")
    ax.set_xticks([1, 10, 100], ["1", "10", "100"])
    ax.set_ylabel("held-out loss [nats per byte]")
    ax.set_title("loss by place, largest models", loc="left")


def _draw_ratios(ax: Any, result: "Result") -> None:
    ratios = result.ratios
    seen = [0.5, 2.0]
    for i in range(1, len(result.sides)):
        loss, ratio, low, high = (np.asarray(part)[0, i] for part in ratios[:4])
        known, look = np.isfinite(ratio), _look(i)
        if not known.any():
            continue
        ax.plot(loss[known], ratio[known], **look)
        ax.fill_between(
            *(loss[known], low[known], high[known]),
            color=look["color"],
            alpha=0.12,
            linewidth=0,
        )
        seen += [float(ratio[known].min()), float(ratio[known].max())]
    if len(seen) == 2:
        ax.text(0.5, 0.6, "none identified", transform=ax.transAxes, ha="center")
    ax.axhline(1, color="0.6", linewidth=0.6, zorder=0)
    ax.set(yscale="log", xlabel="loss reached by both [nats per byte]")
    ticks = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(max(5e-3, min(seen) / 2), min(300.0, 2 * max(seen)))
    ax.set_ylabel("compute / transformer's")
    ax.set_title("compute to equal loss, 90 %", loc="left")
    ax.invert_xaxis()


def _draw_differences(ax: Any, result: "Result") -> None:
    """Means over the seeds, joined; each seed a dash."""
    apart = result.differences
    for i in range(1, len(result.sides)):
        mine, look = apart.side == i, _look(i)
        if not mine.any():
            continue
        # Side by side, where sizes are equal.
        sizes = apart.size[mine] * 1.025 ** (i - len(result.sides) / 2)
        ax.plot(sizes, apart.difference[mine], marker="o", markersize=2, **look)
        each = apart.by_seed[mine].T
        for losses in each:
            ax.plot(sizes, losses, "_", color=look["color"], markersize=4)
        ax.vlines(
            *(sizes, each.min(0), each.max(0)), color=look["color"], linewidth=0.6
        )
    ax.axhline(0, color="0.6", linewidth=0.6, zorder=0)
    ax.set(xscale="log", xlabel="parameters outside embeddings")
    shown = np.unique(apart.size)
    ax.set_xticks(shown, [f"{size:,.0f}" for size in shown])
    ax.minorticks_off()
    ax.set_ylabel("loss less transformer's [nats]")
    ax.set_title("equal parameters and tokens; dashes: seeds", loc="left")
