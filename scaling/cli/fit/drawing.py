"""Figure of a fit: losses and curves, residuals, isoFLOP curves, objective."""

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.plotting import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    colors,
    draw_reference_line,
    label_log_axis,
    label_wide_log_axis,
    sequential_colors,
    set_labels,
)
from jaxkv.report import format_count
from scaling.cli.fit.result import Contour, LogFits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTOUR_LEVELS = (1.01, 1.03, 1.1, 1.3, 2.0, 4.0, 10.0)
"""Contour levels of the objective, relative to its minimum."""
MAX_DOTS = 4096
"""Largest number of rows drawn as dots; of more rows, a fixed random sample is
drawn."""
_GREY = "0.6"


def plot(axes: np.ndarray, result: LogFits) -> None:
    """Draws a result on two rows of two axes."""
    num = len(result.row)
    if num > MAX_DOTS:
        rows = np.sort(np.random.default_rng(0).choice(num, MAX_DOTS, replace=False))
        names = ("row", "num_params", "num_tokens", "flops", "loss", "is_fitted")
        columns = {name: getattr(result, name)[rows] for name in (*names, "group")}
        columns["predicted"] = result.predicted[:, rows]
        result = dataclasses.replace(result, **columns)
    _draw_losses(axes[0, 0], result)
    _draw_residuals(axes[0, 1], result)
    _draw_groups(axes[1, 0], result)
    _draw_contour(axes[1, 1], result.contour, str(result.laws[0]))


def _draw_losses(ax: "Axes", result: LogFits) -> None:
    """Draws the runs, and the first law for some of their sizes."""
    name, x = _axis(result)
    has_sizes = bool(np.isfinite(result.num_params).all())
    shade = sequential_colors(
        np.log(result.num_params) if has_sizes else np.zeros(x.size)
    )
    held = ~result.is_fitted
    _scatter(ax, x, result.loss, shade, held, held_out="held out" if held.any() else "")
    log_sizes = np.log(np.concatenate([result.num_params, result.sizes]))
    lines = zip(result.sizes, result.curves.x, result.curves.y, strict=True)
    styles = itertools.cycle(("-", "--", "-.", ":"))
    for i, (size, flops, loss) in enumerate(lines, len(result.num_params)):
        color = sequential_colors(log_sizes)[i]
        ax.plot(
            flops,
            loss,
            color=color,
            label=format_count(size),
            linestyle=next(styles),
            linewidth=1,
        )
    if result.frontier.x.size:
        label = "optimum" if not len(result.sizes) else "compute optimum"
        label = label if x is result.flops else "law"
        ax.plot(
            *result.frontier,
            label=label,
            color="0.2",
            linewidth=1.4,
            linestyle=(0, (1, 1)),
        )
    if ax.get_legend_handles_labels()[0]:
        ax.legend()
    off = np.abs(np.log(result.loss / result.predicted[0]))[result.is_fitted]
    title = f"{result.laws[0]} fits {off.size:,} runs"
    if off.size:
        title += f" to {100 * np.median(off):.2g} % (median)"
    set_labels(ax, title, name, _label(result), xscale="log", yscale="log")
    label_log_axis(ax.yaxis)
    label_wide_log_axis(ax.xaxis)


def _draw_residuals(ax: "Axes", result: LogFits) -> None:
    """Draws the residuals of each law by compute; held-out runs are hollow."""
    held = ~result.is_fitted
    name, x = _axis(result)
    worst = 0.0
    for i, law in enumerate(result.laws[:MAX_LAWS]):
        color = colors()[LAW_COLORS[i % len(LAW_COLORS)]]
        off = 100 * np.log(result.loss / result.predicted[i])
        mark = "os^dvP"[i % 6]
        _scatter(ax, x, off, np.tile(color, (x.size, 1)), held, fitted=law, mark=mark)
        abs_residuals = np.abs(off[np.isfinite(off)])
        worst = max(worst, float(abs_residuals.max(initial=0.0)))
    draw_reference_line(ax, 0)
    title = f"Residuals: at most {worst:.2g} %"
    title += " (hollow: held out)" if held.any() else ""
    set_labels(ax, title, name, "ln(seen / fitted) [%]", xscale="log")
    label_wide_log_axis(ax.xaxis)
    if len(result.laws) > 1:
        ax.legend()


MAX_LAWS = 5
"""Largest number of laws whose residuals are drawn, the first ones."""
LAW_COLORS = (BLUE, RED, GREEN, ORANGE, PURPLE)
"""Colours of the laws, in order."""


def _scatter(
    ax: "Axes",
    x: np.ndarray,
    y: np.ndarray,
    color: np.ndarray,
    held: np.ndarray,
    *,
    fitted: str = "",
    held_out: str = "",
    mark: str = "o",
) -> None:
    """Draws runs as dots; held-out runs are hollow."""
    ax.scatter(
        x[~held],
        y[~held],
        marker=mark,
        c=color[~held],
        s=14,
        linewidths=0,
        label=fitted or None,
    )
    ax.scatter(
        x[held],
        y[held],
        s=18,
        label=held_out or None,
        marker=mark,
        facecolors="none",
        edgecolors=color[held],
        linewidths=0.9,
    )


def _draw_groups(ax: "Axes", result: LogFits) -> None:
    """Draws the runs of each budget, the parabolas through them, and their minima."""
    set_labels(ax, "isoFLOP curves", "parameters [1]", _label(result))
    if not len(result.parabolas.x):
        _write_notice(ax, "no two budgets\nwith three sizes")
        return
    draw_isoflop_groups(ax, result)
    ax.plot(*result.minima, "k*", markersize=8, label="minimum")
    num = int(np.isfinite(result.minima.x).sum())
    title = f"isoFLOP curves: {num} of {len(result.parabolas.x)} budgets have a minimum"
    set_labels(ax, title, "parameters [1]", _label(result))
    ax.legend()
    high = result.loss.max()
    low = result.loss[result.group >= 0].min(initial=high)
    margin = 0.05 * (high - low)
    # A parabola that misses its runs must not compress the other curves.
    ax.set_ylim(low - margin, min(high, np.nanmax(result.parabolas.y)) + margin)


def draw_isoflop_groups(ax: "Axes", result: LogFits) -> None:
    """Draws the runs of each budget and the parabola through them."""
    marks = itertools.cycle("os^dvP")
    for i, color in enumerate(sequential_colors(np.arange(len(result.parabolas.x)))):
        selected = result.group == i
        if not selected.any():  # no run of this group is drawn
            continue
        flops = float(np.exp(np.log(result.flops[selected]).mean()))
        x = result.num_params[selected]
        y = result.loss[selected]
        ax.plot(
            x,
            y,
            label=f"{flops:.2g} FLOP",
            linestyle="",
            marker=next(marks),
            color=color,
            markersize=4,
        )
        x = result.parabolas.x[i]
        y = result.parabolas.y[i]
        ax.plot(x, y, color=color, linewidth=1)
    ax.set(xscale="log")
    label_wide_log_axis(ax.xaxis)


def _draw_contour(ax: "Axes", contour: Contour, law: str) -> None:
    """Draws the objective with all other coefficients fitted, and the resamples."""
    title = f"{law}: objective over its least value (points: resamples)"
    set_labels(ax, title, "", "")
    if not contour.x_name:
        _write_notice(ax, "fewer than two exponents,\nor fixed coefficients")
        return
    log_levels = np.log10(CONTOUR_LEVELS)
    height = np.log10(contour.objective)
    if not height.size:
        ax.set_title(f"{law}: where resamples ended")
    ax.scatter(
        contour.x_samples,
        contour.y_samples,
        rasterized=True,
        s=2,
        color=colors()[2],
        alpha=0.3,
        linewidths=0,
    )
    if height.max(initial=0.0) > log_levels[0]:
        lines = ax.contour(
            contour.x,
            contour.y,
            height,
            levels=log_levels,
            colors="0.35",
            linewidths=0.8,
        )
        names = {
            float(at): f"{x:g}"
            for at, x in zip(log_levels, CONTOUR_LEVELS, strict=True)
        }
        ax.clabel(lines, fmt=lambda at: names.get(float(at), ""), fontsize=9)
    x = contour.x
    y = contour.y
    ax.plot(x[len(x) // 2], y[len(y) // 2], "k+", ms=5)
    ax.set(xlabel=f"{contour.x_name} [1]", ylabel=f"{contour.y_name} [1]")
    ax.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    ax.locator_params(nbins=5)


def _axis(result: LogFits) -> tuple[str, np.ndarray]:
    """Returns the x axis of runs: compute, or else another quantity of the log."""
    axes = {
        "compute [FLOP]": result.flops,
        "parameters [1]": result.num_params,
        "training data [tokens]": result.num_tokens,
        "row of the log [1]": result.row.astype(float),
    }
    return next((name, x) for name, x in axes.items() if np.isfinite(x).all())


def _label(result: LogFits) -> str:
    """Returns the label of the predicted quantity, with its unit if known."""
    if result.target == "loss":
        return "loss [nats/token]"
    return f"{result.target.replace('_', ' ')} [as logged]"


def _write_notice(ax: "Axes", text: str) -> None:
    """Writes the reason for an empty panel."""
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes)
    ax.set(xticks=[], yticks=[])
    ax.spines[["left", "bottom"]].set_visible(False)
