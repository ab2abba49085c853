"""Figure of a fit to curves: losses, errors at the end, bands, best schedule."""

from typing import TYPE_CHECKING

import numpy as np

from jaxkv.plotting import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    colors,
    draw_reference_line,
    label_log_axis,
    set_labels,
)
from scaling.cli.curves.study import FITTED, ROLES, CurveFits, end_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_TICKS = 4
_MAX_BANDS = 8
"""Largest number of curves whose bands are drawn, the last ones."""


def plot(axes: np.ndarray, result: CurveFits) -> None:
    """Draws a result on two rows of two axes."""
    _draw_curves(axes[0, 0], result)
    _draw_ends(axes[0, 1], result)
    _draw_bands(axes[1, 0], result)
    _draw_schedules(axes[1, 1], result)


def _draw_curves(ax: "Axes", result: CurveFits) -> None:
    """Draws all curves, and the law."""
    is_fitted = result.role == FITTED
    for i in range(is_fitted.size):
        rows = result.curve == i
        step = result.step[rows]
        law = colors()[BLUE if is_fitted[i] else ORANGE]
        ax.plot(step, result.loss[rows], color="0.6", linewidth=2)
        ax.plot(step, result.predicted[rows], color=law, linewidth=0.8)
    ax.plot([], [], color="0.6", label="seen")
    ax.plot([], [], color=colors()[BLUE], label="fitted")
    if not is_fitted.all():
        ax.plot([], [], color=colors()[ORANGE], label="predicted")
    title = f"{is_fitted.size} curves, {is_fitted.sum()} of them fitted"
    set_labels(ax, title, "step [1]", "loss [nats/token]", yscale="log")
    label_log_axis(ax.yaxis)
    ax.locator_params(axis="x", nbins=_MAX_TICKS)
    ax.legend()


def _draw_ends(ax: "Axes", result: CurveFits) -> None:
    """Draws predicted against seen losses at the ends of the curves."""
    predicted = end_values(result, result.predicted)
    measured_loss = end_values(result, result.loss)
    marks = {role: look for role, look in zip(ROLES, _LOOKS, strict=True)}
    for role, (mark, name) in marks.items():
        rows = (result.role == role) & np.isfinite(measured_loss)
        if rows.any():
            off = 100 * (predicted[rows] / measured_loss[rows] - 1)
            ax.plot(measured_loss[rows], off, mark, color=colors()[name], label=role)
    draw_reference_line(ax, 0)
    set_labels(
        ax, "Loss at the end of the curves", "seen [nats/token]", "predicted - seen [%]"
    )
    ax.legend()


_LOOKS = (("o", BLUE), ("s", RED), ("^", ORANGE))


def _draw_bands(ax: "Axes", result: CurveFits) -> None:
    """Draws the loss at the end of the last curves, with its band."""
    other_rows = np.flatnonzero(result.role != FITTED)
    shown = other_rows if other_rows.size else np.flatnonzero(result.role == FITTED)
    shown = shown[-_MAX_BANDS:]
    columns = ("predicted", "low", "high", "loss")
    loss, low, high, seen = (
        end_values(result, getattr(result, name))[shown] for name in columns
    )
    place = np.arange(shown.size)
    color = colors()[BLUE]
    ends = 100 * np.stack([1 - low / loss, high / loss - 1])
    center = np.zeros(shown.size)
    ax.errorbar(center, place, xerr=ends, fmt="o", color=color, capsize=3, label="band")
    if np.isfinite(seen).any():
        off = 100 * (seen / loss - 1)
        ax.plot(off, place, "x", color=colors()[RED], label="seen")
    names = [f"{result.labels[i]}: {x:.3f}" for i, x in zip(shown, loss, strict=True)]
    ax.set_yticks(place, names)
    ax.invert_yaxis()
    what = "Predicted" if other_rows.size else "Fitted"
    title = f"{what} losses at the end [nats/token]"
    set_labels(ax, title, "relative to the prediction [%]", "")
    ax.legend()


def _draw_schedules(ax: "Axes", result: CurveFits) -> None:
    """Draws the best schedule beside cosine and WSD."""
    looks = (
        ("best by the law", result.best, BLUE, "-"),
        ("cosine", result.cosine, RED, "--"),
        ("WSD, 20 % decay", result.wsd, GREEN, "-."),
    )
    for label, curve, name, style in looks:
        step = np.concatenate([[0.0], curve.step])
        rate = np.concatenate([[0.0], curve.rate])
        ax.plot(step, rate, style, color=colors()[name], label=label)
    set_labels(ax, "Schedules", "step [1]", "learning rate [1]")
    ax.locator_params(axis="x", nbins=_MAX_TICKS)
    ax.legend()
