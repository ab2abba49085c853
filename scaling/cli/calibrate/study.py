"""Predicts measured load stages of servers with coefficients that never saw them.

The coefficients of a server's step time are fitted to latencies that clients measured.
Every stage is then predicted by a fit without it: without all stages of its model, or
without the stage itself.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np

from jaxkv.plotting import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Panels,
    colors,
    draw_reference_line,
    set_labels,
)
from jaxkv.progress import QUIET, Progress
from jaxkv.report import ReportPart, Sheet, Study, format_percent, format_seconds
from jaxkv.validation import ConfigRecord, NonNegativeInt, Range
from scaling import shapes
from scaling.calibration import (
    FIT_ROUNDS,
    ROOFLINE_LOOP,
    MeasuredStage,
    fit_posterior,
    format_posterior,
    leave_out,
    predict_stage,
    read_measured_stages,
    simulate_stage,
)
from scaling.cli.calibrate.result import (
    END_TO_END,
    FIRST_TOKEN,
    CalibrationResult,
    Coefficients,
    Fits,
    Overloaded,
    Predictions,
    coefficient_table,
    prediction_rows,
)

DATA_VARIABLE = "JAXKV_DATA"
PUBLISHED_RUNS = "vllm_h100/runs.csv"
"""Environment variable with the folder of published data, and a file in it."""
DESCRIPTIONS = {
    "model": "model left out",
    "load": "load left out",
    "none": "fitted",
    "roofline": "roofline without a fit",
}
"""Kinds of predictions."""
ROOFLINE = jax.tree.map(lambda x: np.full(1, x, np.float32), ROOFLINE_LOOP.server)
"""All rates of the data sheet and no overhead, as one draw."""


class CalibrationConfig(ConfigRecord):
    """A table of measured stages, and what the fits leave out."""

    runs: str = ""
    """CSV of measured load stages; empty for vllm_h100/runs.csv in the folder that the
    environment variable JAXKV_DATA names."""
    leave_out: tuple[Literal["none", "model", "load"], ...] = ("none",)
    """Stages that a fit leaves out and predicts: none (it predicts the fitted stages,
    and its coefficients are kept in server.json), all of a model, or one."""
    roofline: bool = False
    """Also predicts the stages from the data sheet, without fit and overheads."""
    draws: Annotated[int, Range(2)] = 64
    """Draws of the posterior."""
    seed: NonNegativeInt = 0
    """Seed of the fits, and of the noise of predictions."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        check_leave_out(self.leave_out, "none, model, load")


def predict_stages(
    config: CalibrationConfig, progress: Progress = QUIET
) -> CalibrationResult:
    """Fits and predicts; if stopped, keeps the predictions of finished fits.

    Raises:
      ValueError: the table cannot be read, or has too few stages for a fit.
    """
    path = find_measured_runs(config.runs)
    stages = read_measured_stages(path)
    usable = [stage for stage in stages if not stage.is_overloaded]
    folds: list[tuple[str, list[MeasuredStage], list[MeasuredStage]]] = []
    for kind in config.leave_out:
        pairs = [(usable, usable)] if kind == "none" else leave_out(stages, kind)
        folds += [(kind, *pair) for pair in pairs]
    if any(not fitted for _, fitted, _ in folds) or not folds:
        raise ValueError(
            f"{path}: {len(usable)} of {len(stages)} stages are not overloaded, too "
            f"few for leave_out={config.leave_out!r}"
        )
    num = sum(FIT_ROUNDS * len(fitted) + len(held) for _, fitted, held in folds)
    update = progress.bar("calibration", num, "simulations")
    done = 0
    rows = []
    fits = []
    server = ""
    coefficients = Coefficients.of([])

    def on_simulated() -> None:
        nonlocal done
        done += 1
        update(done)
        if progress.stopped:
            raise _Stopped

    try:
        for kind, fitted, held in folds:
            name = {"none": "", "load": held[0].name}.get(kind, _name(held[0].model))
            progress.show(f"left out: {name or kind}")
            posterior = fit_posterior(
                fitted,
                num_draws=config.draws,
                seed=config.seed,
                on_simulated=on_simulated,
            )
            stage_rows = []
            for stage in held:
                unmeasured = dataclasses.replace(
                    stage, end_to_end_s=None, first_token_s=None, inter_token_s=None
                )
                # The claims judge intervals that are not widened by the load.
                plain = posterior._replace(fitted_sizes=None)
                predicted = predict_stage(unmeasured, plain, seed=config.seed)
                stage_rows += prediction_rows(stage, predicted, kind, len(fits))
                on_simulated()
            names = " ".join(posterior.stages)
            fits.append((kind, name, names, posterior.num_effective))
            rows += stage_rows
            if kind == "none":
                server = format_posterior(posterior)
                coefficients = coefficient_table(posterior)
        if config.roofline:
            for stage in usable:
                latencies = simulate_stage(stage, ROOFLINE)
                rows += prediction_rows(stage, latencies, "roofline", -1)
    except _Stopped:
        if not rows:
            raise KeyboardInterrupt("interrupted before the first fit") from None
    return CalibrationResult(
        predictions=Predictions.of(rows),
        fits=Fits.of(fits),
        overloaded=Overloaded.of(
            (stage.name, stage.rate_per_s, stage.successes, stage.failures)
            for stage in stages
            if stage.is_overloaded
        ),
        coefficients=coefficients,
        server=server,
    )


class _Stopped(Exception):
    """Raised inside a fit when the user asked to stop."""


def check_leave_out(kinds: Sequence[str], names: str) -> None:
    """Raises a `ValueError` unless there are kinds, each of them once."""
    if not kinds or len({*kinds}) < len(kinds):
        raise ValueError(f"leave_out={kinds!r} must be one or more of {names}")


def find_measured_runs(name: str) -> Path:
    """Returns the path of a table, by default the published one.

    Raises:
      ValueError: the name is empty, and the environment variable is not set.
    """
    return Path(name) if name else find_published("runs=''", (PUBLISHED_RUNS,))[0]


def find_published(field: str, names: Sequence[str]) -> tuple[Path, ...]:
    """Returns the paths of files in the folder that `DATA_VARIABLE` names.

    Args:
      field: the empty field, for the message.
      names: paths in the folder.

    Raises:
      ValueError: the environment variable is not set.
    """
    if not (folder := os.environ.get(DATA_VARIABLE)):
        raise ValueError(
            f"{field} needs {DATA_VARIABLE}, the folder that has {names[0]}"
        )
    return tuple(Path(folder) / name for name in names)


def _name(model: str) -> str:
    """Returns the name of a checkpoint's shape."""
    return shapes.describe_checkpoint(model).name


def plot(axes: np.ndarray, result: CalibrationResult) -> None:
    """Draws predicted over measured times of each stage, with both intervals."""
    kind = result.kinds()[0]
    axes[1].sharey(axes[0])
    for ax, latency in zip(axes, (END_TO_END, FIRST_TOKEN), strict=True):
        predictions = result.predictions.where(left_out=kind, latency=latency)
        labels: list[str] = []
        models = predictions.distinct("model")
        for model, color in zip(models, _MODEL_COLORS * len(models), strict=False):
            part = predictions.where(model=model)
            part = part.at(np.argsort(part.rate_per_s))
            y = -np.arange(len(labels), len(labels) + len(part))
            labels += [f"{rate:g}" for rate in part.rate_per_s]
            look = {"color": colors()[color], "zorder": 2}
            ranges = (part.low_s, part.high_s), (part.quarter_s, part.three_quarters_s)
            for (low, high), width in zip(ranges, (1.2, 4.0), strict=True):
                ends = low / part.measured_s, high / part.measured_s
                ax.hlines(y, *ends, linewidth=width, **look)
            middle = part.predicted_s / part.measured_s
            mark = "os^dvP"[len(ax.lines) % 6]
            ax.plot(middle, y, mark, markersize=5, label=_name(model), **look)
        draw_reference_line(ax, 1.0, along="y")
        for width, share in ((4.0, 50), (1.2, 90)):
            label = f"{share} % interval"
            ax.plot([], [], color="0.45", linewidth=width, label=label)
        error = np.median(np.abs(predictions.error))
        title = f"{latency}: {format_percent(error)} off (median)"
        x = f"predicted / measured, {DESCRIPTIONS[kind]} [1]"
        set_labels(ax, title, x, "load [requests/s]")
        ax.set_yticks(-np.arange(len(labels)), labels)
        ax.label_outer()
    handles, names = axes[0].get_legend_handles_labels()
    figure = axes[0].figure
    figure.legend(handles, names, loc="outside upper left", ncols=len(names))


_MODEL_COLORS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)


def metrics(result: CalibrationResult) -> dict[str, object]:
    """Returns errors by kind, and the rows of all tables."""
    predictions = result.predictions
    shown = ("stage", "model", "rate_per_s", "latency", "measured_s", "predicted_s")
    return {
        "errors": [
            {"left_out": kind, **row}
            for kind in result.kinds()
            for row in result.errors(kind).rows()
        ],
        "predictions": predictions.rows("left_out", *shown, "low_s", "high_s"),
        "fits": result.fits.rows(),
        "overloaded": result.overloaded.rows(),
        "coefficients": result.coefficients.rows(),
    }


def summary(result: CalibrationResult) -> list[ReportPart]:
    """Returns tables of stages and errors for each kind, and of the coefficients."""
    parts: list[ReportPart] = []
    for kind in result.kinds():
        predictions = result.predictions.where(left_out=kind)
        rows = []
        end_to_end, first = (
            predictions.where(latency=x) for x in (END_TO_END, FIRST_TOKEN)
        )
        for i, (stage, model) in enumerate(
            zip(end_to_end.stage.tolist(), end_to_end.model.tolist(), strict=True)
        ):
            cells = [stage, _name(model)]
            for table in (end_to_end, first):
                cells += [
                    format_seconds(table.measured_s[i]),
                    format_seconds(table.predicted_s[i]),
                    f"{100 * table.error[i]:+.1f} %",
                ]
            rows.append((f"{end_to_end.rate_per_s[i]:g}", *cells))
        heads = ("requests/s", "stage", "model")
        heads += ("end-to-end mean", "predicted", "error")
        heads += ("first token median", "predicted", "error")
        parts.append(Sheet(f"stages: {DESCRIPTIONS[kind]}", heads, rows))
        parts.append(result.errors(kind).sheet(f"errors: {DESCRIPTIONS[kind]}"))
    if len(result.coefficients):
        parts.append(result.coefficients.sheet("coefficients", note=_PRIOR_NOTE))
    if len(result.overloaded):
        title = f"overloaded: {len(result.overloaded)}, neither fitted nor scored"
        parts.append(result.overloaded.sheet(title))
    parts.append(result.fits.sheet("fits"))
    return parts


_PRIOR_NOTE = (
    "The prior of decode_kv_ratio and layer_s was chosen after predictions of left-out "
    "models had missed this project's bars; see `scaling.calibration.PRIOR`."
)


def files(result: CalibrationResult) -> dict[str, str]:
    """Returns the coefficients as a file, if all stages were fitted."""
    return {"server.json": result.server} if result.server else {}


STUDY = Study(
    configs={"calibrate": CalibrationConfig()},
    result=CalibrationResult,
    run=predict_stages,
    plot=plot,
    metrics=metrics,
    summary=summary,
    panels=Panels(1, 2, 4.0),
    files=files,
)
"""Fits and predictions of a table of stages, as a run folder."""
QUESTION = (
    "Do predictions of load stages agree with what clients of real servers measured?"
)
