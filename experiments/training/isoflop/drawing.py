"""The figure of `isoflop`: the lecture's three panels, and the prediction."""

from typing import Any

import numpy as np

from experiments.cli.fit import drawing
from experiments.plotting import colors, plain_log, shades
from experiments.training.isoflop.outcomes import Powers, Result

_GREY = "0.6"
METHODS = {"parabola": "v", "akima": "o", "projection": "s"}
"""How the minima of each method are marked."""


def plot(axes: Any, result: Result) -> None:
    """Draws a result on two rows of three axes."""
    from matplotlib import ticker

    _draw_curves(axes[0, 0], result)
    for ax, name in ((axes[0, 1], "num_params"), (axes[0, 2], "num_tokens")):
        _draw_optima(ax, result, name)
    _draw_groups(axes[1, 0], result)
    _draw_losses(axes[1, 1], result)
    _draw_rates(axes[1, 2], result)
    for ax in axes.flat:  # only powers of ten: others overlap
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())


def _draw_curves(ax: Any, result: Result) -> None:
    """Every run's training loss by compute, and the lower envelope."""
    curves = result.curves
    shade = shades(np.log(curves.num_params))
    for run, first in zip(*np.unique(curves.run, return_index=True), strict=True):
        mine = curves.where(run=run)
        mine = mine.at(np.argsort(mine.flops))
        ax.plot(mine.flops, mine.loss, color=shade[first], linewidth=0.4, alpha=0.8)
    if result.held_out_flops.size:
        x, y = result.held_out_flops, result.held_out_loss
        ax.plot(x, y, color=colors()[6], linewidth=0.6, label="held out")
    there = np.isfinite(result.envelope.loss)
    if there.any():
        x, y = result.envelope.flops[there], result.envelope.loss[there]
        ax.plot(x, y, "k", linewidth=0.9, label="envelope")
    ax.set(xscale="log", yscale="log", xlabel="compute [FLOP]")
    ax.set_ylabel("training loss [nats per token]")
    ax.set_title("training under cosines, small models light")
    low = float(curves.flops.min())
    ax.set_xlim(left=max(low, 1e-3 * float(curves.flops.max())))
    ax.legend(loc="upper right")
    plain_log(ax.yaxis)


def _draw_optima(ax: Any, result: Result, name: str) -> None:
    """The optimum by three approaches, as far as the held-out run."""
    optima, predicted = result.optima, result.predicted
    ends = np.array([optima.flops.min() / 2, predicted["flops"] * 1.5])
    cloud = getattr(result.envelope, name)
    ax.plot(result.envelope.flops, cloud, ".", color=_GREY, markersize=1.5)
    powers = getattr(result.envelope, f"{name}_power")
    _line(ax, powers, ends, _GREY, "1: envelope")
    for i, method in enumerate(optima.methods):
        if method not in METHODS:
            continue
        color = colors()[1 + [*METHODS].index(method)]
        y = getattr(optima, name)[i]
        ax.plot(optima.flops, y, METHODS[method], color=color)
        powers = getattr(optima, f"{name}_power")
        one = Powers(powers.coefficient[i], powers.exponent[i])
        _line(ax, one, ends, color, f"2: {method}")
    surface = result.surface
    ax.plot(surface.flops, getattr(surface, name), "k--", linewidth=0.8, label="3: law")
    ax.plot(predicted["flops"], predicted[name], "*", color=colors()[6], markersize=7)
    what = {"num_params": "parameters", "num_tokens": "tokens"}[name]
    ax.set(
        xscale="log", yscale="log", xlabel="compute [FLOP]", ylabel=f"optimal {what}"
    )
    ax.set_title(f"optimal {what} (star: held out)")
    ax.legend(loc="upper left")


def _line(ax: Any, powers: Powers, x: np.ndarray, color: Any, label: str) -> None:
    if np.isfinite(powers.exponent):
        y = powers.coefficient * x**powers.exponent
        label = f"{label}, C^{powers.exponent:.2f}"
        ax.plot(x, y, color=color, linewidth=0.8, label=label)


def _draw_groups(ax: Any, result: Result) -> None:
    """Losses of one budget by size, and parabolas through them."""
    fit = result.fit
    drawing.draw_groups(ax, fit)
    ax.plot(*fit.minima, "k*", markersize=4)
    ax.set_ylabel("held-out loss [nats per token]")
    ax.set_title("isoFLOP curves")
    ax.margins(x=0.15)


def _draw_losses(ax: Any, result: Result) -> None:
    """What was predicted, and what came."""
    fit, predicted, truth = result.fit, result.predicted, result.truth
    ax.plot(fit.flops, fit.loss, ".", color=_GREY, markersize=2, label="fitted runs")
    surface = result.surface
    ax.plot(surface.flops, surface.loss, "k--", linewidth=0.8, label="law")
    x = surface.flops
    y = predicted["loss_law"][0] * x ** predicted["loss_law"][1]
    ax.plot(x, y, ":", color=_GREY, linewidth=0.9, label="log-linear")
    value = predicted["predicted"]
    ax.errorbar(
        predicted["flops"],
        value,
        [[value - predicted["low"]], [predicted["high"] - value]],
        fmt="_",
        color=colors()[5],
        capsize=2,
        linewidth=0.9,
        label=f"predicted, {predicted['level']:.0%} interval",
    )
    if truth:
        ax.plot(
            truth["flops"], truth["loss"], "*", color=colors()[6], label="held-out run"
        )
    ax.set(xscale="log", yscale="log", xlabel="compute [FLOP]")
    ax.set_ylabel("held-out loss [nats per token]")
    ax.set_title("predicted before it was trained")
    ax.legend(loc="lower left")
    plain_log(ax.yaxis)


def _draw_rates(ax: Any, result: Result) -> None:
    """The best learning rate of every cell, by the tokens of its runs."""
    rates, predicted = result.rates, result.predicted
    widths = np.unique(rates.width)
    for color, width in zip(shades(np.log(widths)), widths, strict=True):
        mine = rates.where(width=width)
        mine = mine.at(np.argsort(mine.num_tokens))
        x, y = mine.num_tokens, mine.learning_rate
        ax.plot(x, y, ".-", color=color, linewidth=0.6)
        ax.annotate(f" {width:.0f}", (x[-1], y[-1]), fontsize=5, color=color)
    x, y = predicted["num_tokens"], predicted["learning_rate"]
    ax.plot(x, y, "*", color=colors()[6], markersize=7)
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="best learning rate")
    ax.set_title("learning rates by width (star: held out)")
    plain_log(ax.yaxis)
