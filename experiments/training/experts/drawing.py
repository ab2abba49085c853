"""The picture of dense models and mixtures: loss against compute, load by expert."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.plotting import style

if TYPE_CHECKING:
    from experiments.training.experts.experiment import Result


def plot(axes: Any, result: "Result") -> None:
    """Draws the runs with their laws on the left, the loads of a pair on the right."""
    from matplotlib import ticker

    palette = style.colors()
    colors = {"dense": palette[5], "mixture": palette[6]}
    for row, (kind, color) in enumerate(colors.items()):
        of_kind = result.kind == kind
        for used, look in (
            (of_kind & result.is_fitted, {"marker": "o"}),
            (of_kind & ~result.is_fitted, {"marker": "x", "alpha": 0.4}),
        ):
            x, y = result.flops[used], result.loss[used]
            axes[0].plot(x, y, linestyle="none", color=color, **look)
        if result.curve_flops.size:
            at, low, high = result.curve_loss[row].T
            axes[0].plot(result.curve_flops, at, color=color, label=kind)
            axes[0].fill_between(result.curve_flops, low, high, color=color, alpha=0.15)
    axes[0].plot([], [], "x", color="0.5", alpha=0.6, label="other learning rates")
    axes[0].set_xscale("log")
    axes[0].set_yscale("log")
    low, high = axes[0].get_ylim()
    ticks = ticker.MaxNLocator(6).tick_values(low, high)
    ticks = [tick for tick in ticks if low <= tick <= high and tick > 0]
    axes[0].set_yticks(ticks, [f"{tick:.1f}" for tick in ticks])
    axes[0].yaxis.set_minor_locator(ticker.NullLocator())
    axes[0].xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
    wide = (np.inf, np.inf)
    axes[0].xaxis.set_major_formatter(
        ticker.LogFormatterSciNotation(minor_thresholds=wide)
    )
    axes[0].tick_params(axis="x", which="minor", labelbottom=False)
    axes[0].set_xlabel("training compute, experts in use [FLOP]")
    axes[0].set_ylabel("held-out loss [nats per byte]")
    axes[0].legend()
    shown = zip(("with", "without"), result.loads, ("-", "--"), strict=True)
    for name, loads, dash in shown:
        for layer, load in enumerate(loads):
            place = np.arange(1, len(load) + 1)
            label = f"layer {layer + 1}, {name} balancing"
            look = {"linestyle": dash, "color": palette[1 + layer % 6]}
            axes[1].plot(place, np.sort(load)[::-1], marker="o", label=label, **look)
    axes[1].axhline(1.0, color="0.7", linewidth=0.8, zorder=0)
    axes[1].set_xlabel("expert, busiest first")
    axes[1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes[1].set_ylabel("load over the mean")
    axes[0].set_title("all runs, laws with 90 % intervals", loc="left")
    axes[1].set_title("load of the experts, held-out text", loc="left")
    if result.loads.size:
        axes[1].legend()
