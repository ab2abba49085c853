"""Fits tasks, predicts larger runs, and scores runs that were not fitted."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.progress import QUIET, Progress
from jaxkv.report import (
    ReportPart,
    ResultRecord,
    Sheet,
    column,
    dumps,
    numbered_list,
)
from scaling.cli.curves import HELD_OUT, PREDICTED
from scaling.cli.forecasts.config import DOWNSTREAM, DownstreamConfig, split_targets
from scaling.forecasts import TaskForecasts, fit_tasks, predict_tasks
from scaling.logs import FLOPS_PER_PARAM_AND_TOKEN, TaskRuns, read_task_runs

TASK_FORMULA = (
    "bits per byte = E + A N^-alpha + B D^-alpha; "
    "accuracy = floor + (1 - floor) / (1 + exp(k (bits per byte - middle)))"
)
_MAX_RUNS = 4
"""Runs with a table of their tasks, the last ones; all are in predictions.csv."""


class ForecastFits(ResultRecord):
    """The document of a fit."""

    document: str = column("content of `fit.json`")


def fit_task_file(config: DownstreamConfig, progress: Progress = QUIET) -> ForecastFits:
    """Reads runs, fits the tasks, and predicts.

    Raises:
      ValueError: a file, a rule, a task or a size cannot be used.
    """
    tasks = config.parsed_tasks
    sizes, tables = split_targets(config.predict)
    runs = read_task_runs(
        config.log, tasks, n=config.n, d=config.d, hold_out=config.hold_out
    )
    fitted = runs.select(~runs.is_held_out)
    progress.show("tasks")
    forecasts = fit_tasks(tasks, fitted)
    targets = [(HELD_OUT, runs.select(runs.is_held_out))]
    if sizes:
        unknown = {task.name: np.full(len(sizes), math.nan) for task in tasks}
        n, d = np.array(sizes).T
        labels = tuple(size.label for size in sizes)
        is_held_out = np.zeros(len(sizes), bool)
        target_runs = TaskRuns(labels, n, d, unknown, unknown, is_held_out)
        targets.append((PREDICTED, target_runs))
    for path in tables:
        table = read_task_runs(path, tasks, n=config.n, d=config.d, needs_metrics=False)
        targets.append((PREDICTED, table))
    document = {
        "law": DOWNSTREAM,
        "formula": TASK_FORMULA,
        "source": "two stages as in Bhagia et al. 2024, arXiv:2412.04403",
        "level": config.level,
        "log": config.log,
        "tasks": {
            name: {
                **fit.powers._asdict(),
                **fit.response._asdict(),
                "loss_noise": fit.loss_noise,
                "accuracy_noise": fit.accuracy_noise,
            }
            for name, fit in forecasts.tasks.items()
        },
        "loss_drift": forecasts.loss_drift,
        "accuracy_drift": forecasts.accuracy_drift,
        "largest_flops": forecasts.largest_flops,
        "rehearsals": [x._asdict() for x in forecasts.rehearsals],
        "runs": _run_rows(fitted),
        "predictions": [
            row
            for role, part in targets
            for row in _predictions(forecasts, part, role, config.level)
        ],
        "warnings": forecasts.warnings,
    }
    document["scores"] = _scores(document["predictions"])
    return ForecastFits(document=dumps(document))


def _run_rows(runs: TaskRuns) -> list[dict[str, Any]]:
    return [
        {
            "run": name,
            "num_params": float(runs.num_params[i]),
            "num_tokens": float(runs.num_tokens[i]),
            "loss": {task: float(x[i]) for task, x in runs.loss.items()},
            "accuracy": {task: float(x[i]) for task, x in runs.accuracy.items()},
        }
        for i, name in enumerate(runs.names)
    ]


def _predictions(
    forecasts: TaskForecasts, runs: TaskRuns, role: str, level: float
) -> list[dict[str, Any]]:
    """Returns a row for each run and task, with measured values where there are."""
    if not runs.names:
        return []
    predictions = predict_tasks(
        forecasts, runs.num_params, runs.num_tokens, level=level
    )
    rows = []
    for i, name in enumerate(runs.names):
        for task, prediction in predictions.items():
            values = {x: float(y[i]) for x, y in prediction._asdict().items()}
            accuracy = float(runs.accuracy[task][i])
            loss = float(runs.loss[task][i])
            is_scored = math.isfinite(accuracy) and accuracy > 0
            rows.append(
                {
                    "run": name,
                    "num_params": float(runs.num_params[i]),
                    "num_tokens": float(runs.num_tokens[i]),
                    "role": role,
                    "task": task,
                    **values,
                    "measured_loss": loss if math.isfinite(loss) else None,
                    "measured_accuracy": accuracy if is_scored else None,
                    "error": values["accuracy"] / accuracy - 1 if is_scored else None,
                    "log_linear_error": values["log_linear"] / accuracy - 1
                    if is_scored
                    else None,
                    "is_covered": values["low"] <= accuracy <= values["high"]
                    if is_scored
                    else None,
                }
            )
    return rows


def _scores(predictions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the mean errors of all scored rows, and of those of each run."""
    scored = [row for row in predictions if row["error"] is not None]
    groups = {"all runs": scored} if scored else {}
    for row in scored:
        groups.setdefault(row["run"], []).append(row)
    return {
        name: {
            "num_scored": len(rows),
            "mean_error": float(np.mean([abs(x["error"]) for x in rows])),
            "log_linear_error": float(
                np.mean([abs(x["log_linear_error"]) for x in rows])
            ),
            "num_covered": sum(x["is_covered"] for x in rows),
        }
        for name, rows in groups.items()
    }


def metrics(result: ForecastFits) -> dict[str, Any]:
    """Returns the document without the fitted runs."""
    document = json.loads(result.document)
    document.pop("runs")
    return document


def summary(result: ForecastFits) -> list[ReportPart]:
    """Returns tables of coefficients, rehearsals, scores and predictions."""
    document = json.loads(result.document)
    level = document["level"]
    names = ("E", "A", "B", "alpha", "floor", "k", "middle")
    coefficients = Sheet(
        DOWNSTREAM,
        ("task", *names),
        [
            (task, *(f"{values[name]:.4g}" for name in names))
            for task, values in document["tasks"].items()
        ],
        f"{document['formula']}. {document['source']}. {len(document['runs'])} runs.",
    )
    parts: list[ReportPart] = [coefficients]
    if document["rehearsals"]:
        parts.append(_rehearsals(document))
    if document["scores"]:
        rows = [
            (
                name,
                f"{x['num_scored']:g}",
                _percent(x["mean_error"]),
                _percent(x["log_linear_error"]),
                f"{x['num_covered']:g} of {x['num_scored']:g}",
            )
            for name, x in document["scores"].items()
        ]
        heads = ("run", "accuracies", "mean error", "log-linear", f"in {level:.0%}")
        note = "Relative errors of accuracies that were not fitted."
        parts.append(Sheet("errors", heads, rows, note))
    by_run: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in document["predictions"]:
        by_run.setdefault((row["run"], row["role"]), []).append(row)
    parts += [_prediction_sheet(document, x) for x in [*by_run.values()][-_MAX_RUNS:]]
    return [*parts, numbered_list("warnings", document["warnings"])]


def _rehearsals(document: Mapping[str, Any]) -> Sheet:
    by_count: dict[int, list[Mapping[str, Any]]] = {}
    for row in document["rehearsals"]:
        by_count.setdefault(row["num_sizes"], []).append(row)
    rows = [
        (
            f"{count}",
            f"{len(items)}",
            f"{math.exp(max(x['distance'] for x in items)):.1f}",
            _percent(float(np.mean([abs(x["relative_error"]) for x in items]))),
        )
        for count, items in by_count.items()
    ]
    heads = ("smallest sizes fitted", "accuracies", "largest compute ratio", "error")
    note = "Mean relative error of the larger sizes; the intervals come from these."
    return Sheet("rehearsals", heads, rows, note)


def _prediction_sheet(
    document: Mapping[str, Any], predictions: Sequence[Mapping[str, Any]]
) -> Sheet:
    rows = [
        (
            row["task"],
            f"{row['loss']:.3f}",
            f"{row['accuracy']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['log_linear']:.3f}",
            "-"
            if row["measured_accuracy"] is None
            else f"{row['measured_accuracy']:.3f}",
            _percent(row["error"], "+"),
        )
        for row in predictions
    ]
    interval = f"{document['level']:.0%} interval"
    heads = (
        "task",
        "bpb",
        "accuracy",
        interval,
        "log-linear",
        "measured",
        "error",
    )
    first = predictions[0]
    flops = FLOPS_PER_PARAM_AND_TOKEN * first["num_params"] * first["num_tokens"]
    ratio = f"{flops / document['largest_flops']:.3g}"
    note = f"{ratio} times the largest fitted compute; bpb: bits per byte."
    return Sheet(f"{first['run']}, {first['role']}", heads, rows, note)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.2f} %"


def task_files(result: ForecastFits) -> dict[str, str]:
    """Returns `fit.json`, and the predictions as a table."""
    document = json.loads(result.document)
    return {
        "fit.json": result.document,
        "predictions.csv": table_text(document["predictions"]),
    }


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as CSV; the first row names the columns."""
    if not rows:
        return ""
    text = io.StringIO()
    table = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
