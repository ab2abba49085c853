"""The figure of a fit: losses and curves, residuals, isoFLOP curves, the objective."""

import dataclasses
from typing import Any

import numpy as np

from experiments.cli.fit.outcomes import Contour, Curve, Result
from experiments.framework import units
from experiments.plotting import colors, plain_log, shades

LEVELS = (1.01, 1.03, 1.1, 1.3, 2.0, 4.0, 10.0)
"""Of the objective, over its least value."""
MAX_DOTS = 4096
"""Rows drawn as dots; of more, some drawn at random, always the same ones."""
_GREY = "0.6"


def plot(axes: Any, result: Result) -> None:
    """Draws a result on two rows of two axes."""
    result = _thinned(result)
    _draw_losses(axes[0, 0], result)
    _draw_residuals(axes[0, 1], result)
    _draw_groups(axes[1, 0], result)
    _draw_contour(axes[1, 1], result.contour, str(result.laws[0]))


def _thinned(result: Result) -> Result:
    """Keeps as many rows as can be told apart."""
    num = len(result.row)
    if num <= MAX_DOTS:
        return result
    rows = np.sort(np.random.default_rng(0).choice(num, MAX_DOTS, replace=False))
    columns = ("row", "num_params", "num_tokens", "flops", "loss", "is_fitted", "group")
    kept = {name: getattr(result, name)[rows] for name in columns}
    return dataclasses.replace(result, **kept, predicted=result.predicted[:, rows])


def _draw_losses(ax: Any, result: Result) -> None:
    """The runs, and the first law for some of their sizes."""
    name, x = _axis(result)
    has_sizes = bool(np.isfinite(result.num_params).all())
    shade = shades(np.log(result.num_params) if has_sizes else np.zeros(x.size))
    held = ~result.is_fitted
    _scatter(ax, x, result.loss, shade, held, held_out="held out" if held.any() else "")
    known = np.log(np.concatenate([result.num_params, result.sizes]))
    lines = zip(result.sizes, result.curves.x, result.curves.y, strict=True)
    for i, (size, flops, loss) in enumerate(lines, len(result.num_params)):
        color, there = shades(known)[i], np.isfinite(loss)
        ax.plot(flops, loss, color=color, linewidth=0.8)
        if there.any():
            at, side = _free_end(flops[there], loss[there], result.frontier)
            ax.annotate(f" {units.count(size)} ", at, fontsize=5, color=color, ha=side)
    if result.frontier.x.size:
        label = "optimum" if not len(result.sizes) else "compute optimum"
        label = label if x is result.flops else "law"
        ax.plot(*result.frontier, "--", color=_GREY, linewidth=0.8, label=label)
    if held.any() or result.frontier.x.size:
        ax.legend(loc="upper right")
    ax.set(xscale="log", yscale="log", xlabel=name)
    ax.set_ylabel(_label(result))
    ax.set_title(f"{result.laws[0]}: runs and fit")
    plain_log(ax.yaxis)


def _draw_residuals(ax: Any, result: Result) -> None:
    """What each law is off by, by compute; hollow for runs it has not seen."""
    held = ~result.is_fitted
    name, x = _axis(result)
    for i, law in enumerate(result.laws):
        color = colors()[(i + 1) % 8]
        off = 100 * np.log(result.loss / result.predicted[i])
        _scatter(ax, x, off, np.tile(color, (x.size, 1)), held, fitted=law)
    ax.axhline(0, color=_GREY, linewidth=0.6)
    ax.set(xscale="log", xlabel=name, ylabel="ln(seen / fitted) [%]")
    ax.set_title("residuals" + (" (hollow: held out)" if held.any() else ""))
    if len(result.laws) > 1:
        ax.legend(loc="best")


def _scatter(
    ax: Any,
    x: np.ndarray,
    y: np.ndarray,
    color: np.ndarray,
    held: np.ndarray,
    *,
    fitted: str = "",
    held_out: str = "",
) -> None:
    """Runs as dots, those held out hollow."""
    at = {"c": color[~held], "s": 7, "linewidths": 0, "label": fitted or None}
    ax.scatter(x[~held], y[~held], **at)
    rings = {"facecolors": "none", "edgecolors": color[held], "linewidths": 0.7}
    ax.scatter(x[held], y[held], s=9, label=held_out or None, **rings)


def _draw_groups(ax: Any, result: Result) -> None:
    """Runs of one budget, the parabolas through them, and their minima."""
    ax.set_title("isoFLOP curves")
    if not len(result.parabolas.x):
        _say(ax, "no two budgets\nwith three sizes")
        return
    draw_groups(ax, result)
    ax.plot(*result.minima, "k*", markersize=4, label="minimum")
    if np.isfinite(result.minima.x).any():
        ax.legend(loc="upper right")
    ax.set_ylabel(_label(result))
    ax.margins(x=0.12)  # for the budgets at the lines' ends
    high = result.loss.max()
    low = result.loss[result.group >= 0].min(initial=high)
    margin = 0.05 * (high - low)
    # A parabola that misses its runs must not shrink the others.
    ax.set_ylim(low - margin, min(high, np.nanmax(result.parabolas.y)) + margin)


def draw_groups(ax: Any, result: Result) -> None:
    """Draws the runs of every budget and the parabola through them."""
    for i, color in enumerate(shades(np.arange(len(result.parabolas.x)))):
        mine = result.group == i
        if not mine.any():  # none of its runs is drawn
            continue
        flops = float(np.exp(np.log(result.flops[mine]).mean()))
        dots = {"s": 7, "color": color, "linewidths": 0}
        ax.scatter(result.num_params[mine], result.loss[mine], **dots)
        x, y = result.parabolas.x[i], result.parabolas.y[i]
        ax.plot(x, y, color=color, linewidth=0.8)
        ax.annotate(f" {flops:.2g}", (x[-1], y[-1]), fontsize=5, color=color)
    ax.set(xscale="log", xlabel="parameters")


def _draw_contour(ax: Any, contour: Contour, law: str) -> None:
    """The objective with the other coefficients fitted, and where resamples ended."""
    ax.set_title(f"{law}: objective over its least value")
    if not contour.x_name:
        _say(ax, "fewer than two exponents,\nor coefficients are given")
        return
    log_levels = np.log10(LEVELS)
    height = np.log10(contour.objective)
    if not height.size:
        ax.set_title(f"{law}: where resamples ended")
    faint = {"s": 1, "color": colors()[2], "alpha": 0.3, "linewidths": 0}
    ax.scatter(contour.x_samples, contour.y_samples, rasterized=True, **faint)
    if height.max(initial=0.0) > log_levels[0]:
        look = {"levels": log_levels, "colors": "0.35", "linewidths": 0.6}
        lines = ax.contour(contour.x, contour.y, height, **look)
        names = {float(at): f"{x:g}" for at, x in zip(log_levels, LEVELS, strict=True)}
        ax.clabel(lines, fmt=lambda at: names.get(float(at), ""), fontsize=5)
    x, y = contour.x, contour.y
    ax.plot(x[len(x) // 2], y[len(y) // 2], "k+", ms=5)
    ax.set(xlabel=contour.x_name, ylabel=contour.y_name)
    ax.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    ax.locator_params(nbins=5)


def _axis(result: Result) -> tuple[str, np.ndarray]:
    """What runs are drawn against: compute, unless the log has none."""
    axes = {
        "compute [FLOP]": result.flops,
        "parameters": result.num_params,
        "tokens": result.num_tokens,
        "row of the log": result.row.astype(float),
    }
    return next((name, x) for name, x in axes.items() if np.isfinite(x).all())


def _label(result: Result) -> str:
    """Names what the laws predict, with its unit where it has one."""
    is_loss = result.target == "loss"
    return "loss [nats per token]" if is_loss else result.target.replace("_", " ")


def _free_end(
    x: np.ndarray, y: np.ndarray, frontier: Curve
) -> tuple[tuple[float, float], str]:
    """The end of a line that lies farther from the optimum, where all lines meet."""
    if frontier.x.size:
        best = np.interp(x[[0, -1]], frontier.x, frontier.y)
        if y[0] / best[0] > y[-1] / best[1]:
            return (float(x[0]), float(y[0])), "right"
    return (float(x[-1]), float(y[-1])), "left"


def _say(ax: Any, text: str) -> None:
    """Says why there is nothing to draw."""
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes)
    ax.set(xticks=[], yticks=[])
    ax.spines[["left", "bottom"]].set_visible(False)
