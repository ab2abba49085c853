"""The picture of what a cache saves: times measured, operations counted."""

from typing import TYPE_CHECKING, Any

from experiments.plotting import style
from experiments.serving.kv_cache.counting import Counted

if TYPE_CHECKING:
    from experiments.serving.kv_cache.experiment import Result

WAYS = ("without a cache", "with a cache")


def draw(axes: Any, result: "Result") -> None:
    """Draws a token above, a text below; times on the left, operations on the right."""
    palette = style.colors()
    colors, timed = (palette[6], palette[5]), result.timed
    for ax, pair in (
        (axes[0, 0], (timed.without_s, timed.with_s)),
        (axes[1, 0], timed.totals_s() if timed.length.size else ([], [])),
    ):
        for seconds, color, name in zip(pair, colors, WAYS, strict=True):
            ax.plot(timed.length, seconds, marker="o", color=color, label=name)
        ax.set_ylabel("s")
    models = ((result.counted, "-"), (result.other, "--"))
    for (counted, dash), place in ((x, i) for x in models for i in (0, 1)):
        values = (counted.token_flops, counted.total_flops)[place]
        for row, color in zip(values, colors, strict=True):
            look = {"linestyle": dash, "color": color}
            axes[place, 1].plot(counted.length, row, **look)
    _draw_slopes(axes[1, 1], result.other)
    _name_models(axes[0, 1], models)
    axes[0, 0].legend()
    for row, (what, label) in enumerate(
        (("a token", "tokens before it"), ("a text", "tokens of the text"))
    ):
        for column, how in enumerate(("measured", "counted")):
            ax = axes[row, column]
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set_xlabel(label)
            ax.set_title(f"{what}, {how}", loc="left")
        axes[row, 1].set_ylabel("FLOP")


def _name_models(ax: Any, models: Any) -> None:
    for counted, dash in models:
        ax.plot([], [], color="0.4", linestyle=dash, label=counted.name)
    ax.legend()


def _draw_slopes(ax: Any, counted: Counted) -> None:
    """Grey lines of slope 3 and 2 through the last points."""
    end = counted.length[-1]
    x = counted.length[counted.length >= end / 256]
    for row, power in zip(counted.total_flops, (3, 2), strict=True):
        y = row[-1] * (x / end) ** float(power)
        ax.plot(x, y, color="0.7", linewidth=0.8, zorder=0)
        look = {"fontsize": 6, "color": "0.45", "ha": "left", "va": "top"}
        ax.text(x[0], y[0], f" $t^{power}$", **look)
