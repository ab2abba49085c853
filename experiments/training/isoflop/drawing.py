"""The figure of `isoflop`: the lecture's three panels, and the prediction."""

from typing import TYPE_CHECKING

import numpy as np

from experiments import lab
from experiments.training.isoflop.outcomes import ComputePowers, Result
from jaxkv.report import format_count
from scaling.cli import draw_isoflop_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

_GREY = "0.6"
METHOD_STYLES = {
    "parabola": (lab.ORANGE, "v"),
    "akima": (lab.SKY, "o"),
    "projection": (lab.GREEN, "s"),
}
"""Colour and marker of each method's minima."""


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws a result on 3 rows of 2 axes."""
    from matplotlib import ticker

    _draw_curves(axes[0, 0], result)
    ax = axes[0, 1]
    fit = result.fit
    draw_isoflop_groups(ax, fit)
    ax.plot(*fit.minima, "k*", markersize=8, label="minimum")
    num = int(np.isfinite(fit.minima.x).sum())
    title = f"isoFLOP curves: {num} of {len(fit.minima.x)} budgets have a minimum"
    lab.set_labels(ax, title, "parameters [1]", "held-out loss [nats/token]")
    ax.legend()
    for ax, name in ((axes[1, 0], "num_params"), (axes[1, 1], "num_tokens")):
        _draw_optima(ax, result, name)
    _draw_losses(axes[2, 0], result)
    _draw_rates(axes[2, 1], result)
    for ax in axes.flat:  # powers of ten only: other labels overlap
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())


def _draw_curves(ax: "Axes", result: Result) -> None:
    """Draws the training loss of every run by compute, and the lower envelope."""
    curves = result.curves
    shade = lab.sequential_colors(np.log(curves.num_params))
    for run, first in zip(*np.unique(curves.run, return_index=True), strict=True):
        subset = curves.where(run=run)
        subset = subset.at(np.argsort(subset.flops))
        ax.plot(subset.flops, subset.loss, color=shade[first], linewidth=0.6, alpha=0.8)
    sizes, first_rows = np.unique(curves.num_params, return_index=True)
    for size, first in zip(sizes, first_rows, strict=True):
        ax.plot([], [], color=shade[first], label=format_count(size))
    if result.held_out_flops.size:
        look = {"marker": "", "linewidth": 0.8}
        x = result.held_out_flops
        y = result.held_out_loss
        lab.draw_curve(ax, x, y, lab.RED, "held-out run", **look)
    mask = np.isfinite(result.envelope.loss)
    if mask.any():
        x = result.envelope.flops[mask]
        y = result.envelope.loss[mask]
        ax.plot(x, y, "k", linewidth=1.4, label="envelope")
    num = len(np.unique(curves.run))
    low = float(curves.flops.min())
    title = f"Training under cosines: {num} runs and their envelope"
    y = "training loss [nats/token]"
    lab.set_labels(ax, title, "compute [FLOP]", y, xscale="log", yscale="log")
    ax.set_xlim(left=max(low, 1e-3 * float(curves.flops.max())))
    ax.legend(title="model size [parameters]")
    lab.label_log_axis(ax.yaxis)


def _draw_optima(ax: "Axes", result: Result, name: str) -> None:
    """Draws the optimum by 3 approaches, up to the held-out run."""
    optima = result.optima
    predicted = result.predicted
    ends = np.array([optima.flops.min() / 2, predicted["flops"] * 1.5])
    cloud = getattr(result.envelope, name)
    ax.plot(result.envelope.flops, cloud, ".", color=_GREY, markersize=2)
    powers = getattr(result.envelope, f"{name}_power")
    _line(ax, powers, ends, _GREY, "envelope")
    exponents = [powers.exponent]
    for method, (color, mark) in METHOD_STYLES.items():
        if method not in optima.methods:
            continue
        i = [*optima.methods].index(method)
        ax.plot(optima.flops, getattr(optima, name)[i], mark, color=lab.colors()[color])
        powers = getattr(optima, f"{name}_power")
        one = ComputePowers(powers.coefficient[i], powers.exponent[i])
        _line(ax, one, ends, lab.colors()[color], method)
        exponents.append(one.exponent)
    surface = result.surface
    ax.plot(surface.flops, getattr(surface, name), "k--", linewidth=1, label="law")
    _star(ax, predicted["flops"], predicted[name])
    what = {"num_params": "parameters", "num_tokens": "tokens"}[name]
    finite_exponents = [x for x in exponents if np.isfinite(x)]
    title = f"Optimal {what}"
    if finite_exponents:
        title += (
            f" grow as C^{min(finite_exponents):.2f} to C^{max(finite_exponents):.2f}"
        )
    y = f"optimal number [{what}]"
    lab.set_labels(ax, title, "compute C [FLOP]", y, xscale="log", yscale="log")
    ax.legend()


def _star(ax: "Axes", x: float, y: float) -> None:
    ax.plot(x, y, "*", label="held-out run", color=lab.colors()[lab.RED], markersize=10)


def _line(
    ax: "Axes", powers: ComputePowers, x: np.ndarray, color: "ColorType", label: str
) -> None:
    if np.isfinite(powers.exponent):
        y = powers.coefficient * x**powers.exponent
        label = f"{label}, C^{powers.exponent:.2f}"
        ax.plot(x, y, color=color, linewidth=1, label=label)


def _draw_losses(ax: "Axes", result: Result) -> None:
    """Draws fitted, predicted and held-out losses."""
    fit = result.fit
    predicted = result.predicted
    truth = result.truth
    ax.plot(fit.flops, fit.loss, ".", label="fitted runs", color=_GREY, markersize=4)
    surface = result.surface
    label = f"law ({predicted['law']})"
    ax.plot(surface.flops, surface.loss, "k--", linewidth=1, label=label)
    x = surface.flops
    y = predicted["loss_law"][0] * x ** predicted["loss_law"][1]
    ax.plot(x, y, ":", color=_GREY, linewidth=1.2, label="log-linear")
    value = predicted["predicted"]
    at = predicted["flops"]
    color = lab.colors()[lab.BLUE]
    level = predicted["level"]
    ax.vlines(
        at, predicted["low"], predicted["high"], color=color, linewidth=3, alpha=0.5
    )
    by_law = [*predicted["by_law"].values()]
    places = [at] * len(by_law)
    ax.plot(places, by_law, "_", color="k", markersize=7, label="each law")
    label = f"predicted: mean of {len(by_law)} laws, {level:.0%} interval"
    ax.plot([at], [value], "D", color=color, markersize=5, label=label)
    title = f"Ten times the compute: predicted {value:.3f} nats/token"
    if truth:
        _star(ax, truth["flops"], truth["loss"])
        title += f", trained {truth['loss']:.3f}"
    y = "held-out loss [nats/token]"
    lab.set_labels(ax, title, "compute [FLOP]", y, xscale="log", yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.legend()


def _draw_rates(ax: "Axes", result: Result) -> None:
    """Draws the best learning rate of every cell, at the held-out run's tokens."""
    rates = result.rates
    predicted = result.predicted
    by_width, by_tokens = predicted["rate_powers"]
    moved = (rates.num_tokens / predicted["num_tokens"]) ** -by_tokens
    color = lab.colors()[lab.BLUE]
    y = rates.learning_rate * moved
    tokens = format_count(predicted["num_tokens"])
    label = f"best rate of a run, moved to {tokens} tokens"
    ax.plot(rates.width, y, "o", color=color, label=label)
    ends = np.array([rates.width.min(initial=predicted["width"]), predicted["width"]])
    line = predicted["learning_rate"] * (ends / predicted["width"]) ** by_width
    ax.plot(ends, line, "k--", linewidth=1, label="fitted powers")
    _star(ax, predicted["width"], predicted["learning_rate"])
    title = f"Best rates fall as width^{by_width:.2f} and tokens^{by_tokens:.2f}"
    y = "best learning rate [1]"
    lab.set_labels(ax, title, "width [features]", y, xscale="log", yscale="log")
    lab.label_log_axis(ax.yaxis)
    lab.label_log_axis(ax.xaxis)
    ax.legend()
