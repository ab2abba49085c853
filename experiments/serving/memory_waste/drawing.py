"""Figures 1 and 2 of the paged-attention paper, drawn of our runs."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.plotting import style
from experiments.serving.memory_waste import published

if TYPE_CHECKING:
    from experiments.serving.memory_waste.experiment import Result

_USES = ("token states", "reservation", "internal", "external and rest")
_COLORS = (3, 4, 1, 6)


def draw(axes: Any, result: "Result") -> None:
    """Draws on four axes."""
    _parts(axes[0][0], result)
    _uses(axes[0][1], result)
    _memory(axes[1][0], result)
    _throughput(axes[1][1], result)


def _parts(ax: Any, result: "Result") -> None:
    """One bar: weights, keys and values, the rest."""
    colors, left = style.colors(), 0.0
    rest = result.memory_bytes - result.weight_bytes - result.kv_bytes
    for label, size, color in (
        ("parameters", result.weight_bytes, "0.75"),
        ("keys and values", result.kv_bytes, colors[6]),
        ("rest", rest, colors[4]),
    ):
        ax.barh(0, size / 1e9, left=left / 1e9, color=color, height=0.5)
        share = size / result.memory_bytes
        ax.annotate(
            f"{label}\n{size / 1e9:.1f} GB\n{100 * share:.0f} %",
            ((left + size / 2) / 1e9, 0.3 if share < 0.1 else 0),
            ha="center",
            va="bottom" if share < 0.1 else "center",
        )
        left += size
    ax.set_yticks([])
    ax.set_ylim(-0.6, 0.9)
    ax.set_xlabel("memory (GB)")
    ax.set_title("OPT-13B on an A100 of 40 GB")


def _uses(ax: Any, result: "Result") -> None:
    """Ours, and the printed shares beside it, paler."""
    colors = style.colors()
    names = [str(name) for name in result.system]
    ours = 100 * result.waste.uses.mean(axis=1)
    printed = np.array(
        [[x or 0.0 for x in published.USES[name]] for name in names], float
    )
    places = np.arange(len(names))
    for values, shift, alpha in ((ours, -0.2, 1.0), (printed, 0.2, 0.45)):
        bottom = np.zeros(len(names))
        for k, use in enumerate(_USES):
            ax.bar(
                places + shift,
                values[:, k],
                0.38,
                bottom=bottom,
                color=colors[_COLORS[k]],
                alpha=alpha,
                label=use if alpha == 1.0 else None,
            )
            for x, value, low in zip(places, values[:, k], bottom, strict=True):
                if value > 4:
                    ax.annotate(
                        f"{value:.1f}",
                        (x + shift, low + value / 2),
                        ha="center",
                        va="center",
                        fontsize=5.5,
                    )
            bottom += values[:, k]
    ax.set_xticks(places, [x.replace("Orca ", "Orca\n") for x in names])
    ax.set_ylim(0, 130)
    ax.set_ylabel("token places (%)")
    ax.set_title("what they hold; paper's pale")
    ax.legend(loc="upper left", ncols=2, fontsize=6)


def _memory(ax: Any, result: "Result") -> None:
    weights, places = result.weight_bytes / 1e9, result.kv_bytes / 1e9
    for label, height, sides in (
        ("parameters", weights, "-"),
        ("all that there is for keys and values", weights + places, ":"),
    ):
        ax.axhline(height, color="0.6", linewidth=0.8, linestyle=sides)
        ax.annotate(
            label,
            (0.98, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            color="0.4",
            fontsize=6,
        )
    _lines(ax, result, result.growth.memory_bytes / 1e9, says_end=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=6)
    ax.set_ylim(weights - 1, weights + places + 2)
    ax.set_ylabel("memory (GB)")
    ax.set_title("memory by requests at once")


def _throughput(ax: Any, result: "Result") -> None:
    _lines(ax, result, result.growth.tokens_per_s, says_end=True)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("tokens/s")
    ax.set_title("throughput by requests at once")


def _lines(ax: Any, result: "Result", values: np.ndarray, *, says_end: bool) -> None:
    """Lines up to the last request that fits, and what there is there."""
    colors = style.colors()
    for k, (name, line) in enumerate(zip(result.system, values, strict=True)):
        color = colors[(6, 1, 2, 5)[k]]
        last = np.flatnonzero(np.isfinite(line))[-1]
        ax.plot(result.growth.requests, line, color=color, label=str(name))
        ax.plot(result.growth.requests[last], line[last], "o", color=color)
        ax.annotate(
            f"{name}: {line[last]:.0f}" if says_end else "",
            (result.growth.requests[last], line[last]),
            xytext=(3, -4),
            textcoords="offset points",
            va="top",
            fontsize=6,
            color=color,
        )
    ax.set_xlim(0, 1.2 * result.growth.requests[-1])
    ax.set_xlabel("requests at once")
