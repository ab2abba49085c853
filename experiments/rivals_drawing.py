"""The figure of `rivals`: curves by compute, loss by place, ratios, differences."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import rivals_fits, style

if TYPE_CHECKING:
    from experiments.rivals import Result


def plot(axes: Any, result: "Result") -> None:
    """Draws a result on two rows of two axes."""
    _draw_curves(axes[0, 0], result)
    _draw_places(axes[0, 1], result)
    _draw_ratios(axes[1, 0], result)
    _draw_differences(axes[1, 1], result)


def _color(side: int) -> Any:
    """Black for the reference; yellow, too light for a line, is left out."""
    colors = style.colors()
    usable = [colors[0], colors[6], colors[5], colors[3], colors[1], colors[7]]
    return (*usable, colors[2])[side % 7]


def _draw_curves(ax: Any, result: "Result") -> None:
    """Every finished run, small; those of a side's frontier large, with its curve."""
    runs = result.runs
    for i, name in enumerate(result.sides):
        mine, color, strong = runs.side == i, _color(i), i < 2
        flops, loss = runs.flops[mine], runs.loss[mine]
        best = rivals_fits.frontier(flops, loss)
        if strong:
            ax.plot(flops, loss, "o", color=color, markersize=1.5)
        ax.plot(
            *(flops[best], loss[best], "o"),
            color=color,
            markersize=3.5 if strong else 2,
            label=str(name),
        )
        ax.plot(
            *(result.curves.flops[i], result.curves.loss[i]),
            color=color,
            linewidth=1.2 if strong else 0.7,
        )
    ax.set(xscale="log", xlabel="training compute, exact [FLOP]")
    ax.tick_params(axis="x", which="minor", labelbottom=False)
    ax.set_ylabel("held-out loss [nats per byte]")
    ax.set_title("best runs by compute, and a curve", loc="left")
    ax.legend(fontsize=6, loc="lower left")


def _draw_places(ax: Any, result: "Result") -> None:
    for i, name in enumerate(result.sides):
        strong = i < 2
        ax.plot(
            *(result.places.place, result.places.loss[i]),
            color=_color(i),
            linewidth=1.2 if strong else 0.7,
            label=str(name),
        )
    ax.axvline(100, color="0.8", linewidth=0.6, zorder=0)
    ax.set(xscale="log", xlabel="bytes seen before and with the place")
    ax.set_ylabel("held-out loss [nats per byte]")
    ax.set_title("loss by place, largest models", loc="left")
    ax.legend(fontsize=6, loc="upper right")


def _draw_ratios(ax: Any, result: "Result") -> None:
    ratios = result.ratios
    seen = [0.5, 2.0]
    for i, name in list(enumerate(result.sides))[1:]:
        loss, ratio, low, high = (np.asarray(part)[0, i] for part in ratios[:4])
        known = np.isfinite(ratio)
        if not known.any():
            continue
        ax.plot(loss[known], ratio[known], color=_color(i), label=str(name))
        ax.fill_between(
            *(loss[known], low[known], high[known]),
            color=_color(i),
            alpha=0.12,
            linewidth=0,
        )
        seen += [float(ratio[known].min()), float(ratio[known].max())]
    ax.axhline(1, color="0.6", linewidth=0.6, zorder=0)
    ax.set(yscale="log", xlabel="loss reached by both [nats per byte]")
    ticks = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    # Room for the legend above.
    ax.set_ylim(max(5e-3, min(seen) / 2), min(300.0, 4 * max(seen)))
    ax.set_ylabel("compute / transformer's")
    ax.set_title("compute to equal loss, 90 %", loc="left")
    ax.invert_xaxis()
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=6, ncols=2, loc="upper left")


def _draw_differences(ax: Any, result: "Result") -> None:
    apart = result.differences
    for i, name in list(enumerate(result.sides))[1:]:
        mine = apart.side == i
        ax.errorbar(
            *(apart.size[mine] * 1.03 ** (i - 2), apart.difference[mine]),
            yerr=2 * apart.se[mine],
            color=_color(i),
            marker="o",
            linewidth=0.8,
            label=str(name),
        )
    ax.axhline(0, color="0.6", linewidth=0.6, zorder=0)
    ax.set(xscale="log", xlabel="parameters outside embeddings")
    ax.set_ylabel("loss less transformer's [nats]")
    ax.set_title("equal parameters and tokens, 2 s.e.", loc="left")
