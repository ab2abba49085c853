"""Figures of fits to tasks, and to learning rates and batch sizes."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.plotting import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    RED,
    colors,
    draw_reference_line,
    label_log_axis,
    set_labels,
)
from scaling.cli.forecasts.downstream import ForecastFits
from scaling.forecasts import MEAN_PAIR, NEAREST_CELL, PUBLISHED, SURFACE, Valley

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_TASKS = 4
"""Tasks whose stages are drawn, the first ones."""
_MAX_DRAWN_CELLS = 10
"""Cells whose loss lost is drawn, the last ones."""
_MARKS = (("o", BLUE), ("s", RED), ("^", GREEN), ("D", ORANGE))


def plot_tasks(axes: np.ndarray, result: ForecastFits) -> None:
    """Draws the fitted stages, the rehearsals and the predictions."""
    document = json.loads(result.document)
    _draw_losses(axes[0, 0], document)
    _draw_accuracies(axes[0, 1], document)
    _draw_rehearsals(axes[1, 0], document["rehearsals"])
    _draw_predictions(axes[1, 1], document)


def _shown_tasks(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns name and look of the points of the first tasks."""
    names = [*document["tasks"]][:_MAX_TASKS]
    return [
        (name, {"marker": mark, "color": colors()[color], "linestyle": ""})
        for name, (mark, color) in zip(names, _MARKS, strict=False)
    ]


def _draw_losses(ax: "Axes", document: Mapping[str, Any]) -> None:
    """Draws fitted against measured bits per byte of the fitted runs."""
    n, d = np.array([(x["num_params"], x["num_tokens"]) for x in document["runs"]]).T
    for name, look in _shown_tasks(document):
        c = document["tasks"][name]
        measured = np.array([x["loss"][name] for x in document["runs"]])
        loss = c["E"] + c["A"] * n ** -c["alpha"] + c["B"] * d ** -c["alpha"]
        ax.plot(measured, 100 * (loss / measured - 1), **look, label=name)
    draw_reference_line(ax, 0)
    title = "First stage"
    set_labels(ax, title, "measured loss [bits/byte]", "fitted - measured [%]")
    ax.legend()


def _draw_accuracies(ax: "Axes", document: Mapping[str, Any]) -> None:
    """Draws accuracy against bits per byte, and the fitted response."""
    for name, look in _shown_tasks(document):
        c = document["tasks"][name]
        loss = np.array([x["loss"][name] for x in document["runs"]])
        accuracy = np.array([x["accuracy"][name] for x in document["runs"]])
        ends = [x["loss"] for x in document["predictions"] if x["task"] == name]
        line = np.linspace(min([loss.min(), *ends]), loss.max(), 100)
        rise = 1 / (1 + np.exp(c["k"] * (line - c["middle"])))
        ax.plot(loss, 100 * accuracy, **look, label=name)
        ax.plot(line, 100 * (c["floor"] + (1 - c["floor"]) * rise), color=look["color"])
    title = "Second stage"
    set_labels(ax, title, "loss of the answer [bits/byte]", "accuracy [%]")
    ax.legend()


def _draw_rehearsals(ax: "Axes", rehearsals: Sequence[Mapping[str, Any]]) -> None:
    """Draws errors of forecasts of larger sizes by smaller ones."""
    counts = sorted({x["num_sizes"] for x in rehearsals})
    for count, (mark, color) in zip(counts, _MARKS, strict=False):
        rows = [x for x in rehearsals if x["num_sizes"] == count]
        ratio = np.exp([x["distance"] for x in rows])
        error = [100 * x["relative_error"] for x in rows]
        ax.plot(ratio, error, mark, color=colors()[color], label=f"{count} sizes")
    draw_reference_line(ax, 0)
    x = "compute / largest fitted [1]"
    set_labels(ax, "Rehearsals by smaller sizes", x, "error of accuracy [%]")
    if counts:
        ax.set_xscale("log")
        label_log_axis(ax.xaxis)
        ax.legend()


def _draw_predictions(ax: "Axes", document: Mapping[str, Any]) -> None:
    """Draws the predictions of the last run, or the fitted accuracy of the largest."""
    rows = document["predictions"]
    if not rows:
        ax.set_axis_off()
        return
    run = rows[-1]["run"]
    rows = [row for row in rows if row["run"] == run][-len(document["tasks"]) :]
    place = np.arange(len(rows))
    accuracy, low, high, line = (
        100 * np.array([row[name] for row in rows])
        for name in ("accuracy", "low", "high", "log_linear")
    )
    ends = np.stack([accuracy - low, high - accuracy])
    color = colors()[BLUE]
    ax.errorbar(
        accuracy, place, xerr=ends, fmt="o", color=color, capsize=3, label="two-stage"
    )
    ax.plot(line, place, "s", color=colors()[ORANGE], label="log-linear")
    points = [
        (100 * row["measured_accuracy"], i)
        for i, row in enumerate(rows)
        if row["measured_accuracy"] is not None
    ]
    if points:
        ax.plot(*zip(*points, strict=True), "x", color=colors()[RED], label="measured")
    ax.set_yticks(place, [row["task"] for row in rows])
    ax.invert_yaxis()
    title = f"{run}, {document['level']:.0%} intervals"
    set_labels(ax, title, "accuracy [%]", "")
    ax.legend()


def plot_rates(axes: np.ndarray, result: ForecastFits) -> None:
    """Draws the best pairs, the valley, and the loss lost."""
    document = json.loads(result.document)
    _draw_powers(axes[0, 0], document, "rate", "learning rate", "1")
    _draw_powers(axes[0, 1], document, "batch", "batch size", "unit of log")
    _draw_valley(axes[1, 0], document)
    _draw_lost(axes[1, 1], document["predictions"])


def _draw_powers(
    ax: "Axes", document: Mapping[str, Any], name: str, label: str, unit: str
) -> None:
    """Draws best measured against fitted rates or batches."""
    cells = document["cells"]
    fitted = np.array([x[f"fitted_{name}"] for x in cells])
    ax.plot(fitted, [x[name] for x in cells], "o", color=colors()[BLUE], label="fitted")
    ends = [fitted.min(), fitted.max()]
    rows = [x for x in document["predictions"] if x["role"] != "fitted"]
    for row in rows:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        if high is not None:  # finite
            ax.plot([row[name]] * 2, [low, high], "-", color=colors()[ORANGE])
        ends += [row[name]]
    if rows:
        ax.plot([], [], "-", color=colors()[ORANGE], label="interval")
    rows = [x for x in rows if x["measured"] is not None]
    if rows:
        x = [row[name] for row in rows]
        y = [row["measured"][f"best_{name}"] for row in rows]
        ax.plot(x, y, "x", color=colors()[RED], label="not fitted")
    line = [min(ends), max(ends)]
    ax.plot(line, line, "--", color="0.5", linewidth=1)
    words = (f"{label} by the law [{unit}]", f"measured {label} [{unit}]")
    set_labels(ax, f"Best {label}", *words, xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        label_log_axis(axis)
    ax.legend()


def _draw_valley(ax: "Axes", document: Mapping[str, Any]) -> None:
    """Draws the loss lost around the last prediction, or the last cell."""
    if document["predictions"]:
        last = document["predictions"][-1]
        size, rate, batch = last["size"], last["rate"], last["batch"]
    else:
        last = document["cells"][-1] | {"measured": None}
        size, rate, batch = "last cell", last["fitted_rate"], last["fitted_batch"]
    span = np.linspace(np.log(1 / 6), np.log(6), 121)
    u, v = np.meshgrid(span, span)
    valley = Valley(**document["valley"])
    lost = 100 * np.expm1(valley.excess(u.ravel(), v.ravel())).reshape(u.shape)
    levels = (0.1, 0.3, 1.0, 3.0)
    lines = ax.contour(
        batch * np.exp(v), rate * np.exp(u), lost, levels, colors="0.4", linewidths=1
    )
    ax.clabel(lines, fmt="%g %%", fontsize=9)
    points = [(batch, rate, "o", BLUE, "predicted best")]
    if (cell := last["measured"]) is not None:
        near = cell["nearest"][SURFACE]
        best = (cell["best_batch"], cell["best_rate"])
        points.append((near["batch"], near["rate"], "s", ORANGE, "nearest"))
        points.append((*best, "x", RED, "best measured"))
    for x, y, mark, color, label in points:
        ax.plot([x], [y], mark, color=colors()[color], label=label)
    x = "batch size [unit of log]"
    title = f"Loss lost at {size}"
    set_labels(ax, title, x, "learning rate [1]", xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        label_log_axis(axis)
    ax.legend()


def _draw_lost(ax: "Axes", predictions: Sequence[Mapping[str, Any]]) -> None:
    """Draws the loss lost by each way to choose a pair, by cell."""
    rows = [x for x in predictions if x["measured"] is not None][-_MAX_DRAWN_CELLS:]
    if not rows:
        ax.set_axis_off()
        return
    looks = (
        (SURFACE, "o", BLUE),
        (NEAREST_CELL, "s", ORANGE),
        (MEAN_PAIR, "^", GREEN),
        (PUBLISHED, "x", BLACK),
    )
    place = np.arange(len(rows))
    for i, (name, mark, color) in enumerate(looks):
        lost = [100 * x["measured"]["nearest"][name]["lost"] for x in rows]
        ax.plot(lost, place + 0.15 * (i - 1.5), mark, color=colors()[color], label=name)
    ax.set_yticks(place, [x["size"] for x in rows])
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    set_labels(ax, "Nearest measured pair", "loss above the lowest [%]", "")
    ax.legend()
