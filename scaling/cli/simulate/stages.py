"""Predictions of the load stages of a table: `jaxkv simulate --stages FILE`."""

from typing import Any

import numpy as np

from jaxkv.progress import Progress
from jaxkv.report import Sheet, format_rate
from scaling import shapes
from scaling.calibration import (
    LatencySummary,
    LoadSizes,
    MeasuredStage,
    OutsideSize,
    ServerPosterior,
    find_outside_sizes,
    predict_stage,
    read_measured_stages,
)
from scaling.cli.simulate.case import load_coefficients
from scaling.cli.simulate.options import SimulateOptions
from scaling.cli.simulate.summary import LEVEL
from scaling.cli.simulate.tables import describe_outside, fitted_rows, format_estimate

_STATISTIC_OF_COLUMN = {
    "e2e_s": ("end_to_end_s", "mean"),
    "ttft_s": ("first_token_s", "median"),
    "tpot_s": ("inter_token_s", "mean"),
}
"""Field of the latencies, and the statistic that is compared, by key."""


def predict_table(
    options: SimulateOptions, progress: Progress
) -> tuple[dict[str, Any], ServerPosterior]:
    """Predicts each row of a table; returns the document and the coefficients.

    Raises:
      ValueError: the table or the coefficients cannot be read, or a stage does not fit
        into memory.
    """
    assert options.stages is not None
    stages = read_measured_stages(options.stages)
    posterior = load_coefficients(options)
    rows = []
    for stage in progress.track(stages, "predicted", "stages"):
        rows.append(_predict_row(stage, posterior, options.seed))
    document: dict[str, Any] = {"rows": rows}
    judged = [x for x in rows if x["e2e_s"]["error"] is not None]
    judged = [x for x in judged if not x["is_overloaded"]]
    if judged:
        document |= {
            "num_judged": len(judged),
            "coverage": {
                key: float(np.mean([x[key]["covered"] for x in judged]))
                for key in _STATISTIC_OF_COLUMN
            },
            "median_error": {
                key: float(np.median([abs(x[key]["error"]) for x in judged]))
                for key in _STATISTIC_OF_COLUMN
            },
            "largest_error": {
                key: max(abs(x[key]["error"]) for x in judged)
                for key in _STATISTIC_OF_COLUMN
            },
        }
    return document, posterior


def _predict_row(
    stage: MeasuredStage, posterior: ServerPosterior, seed: int
) -> dict[str, Any]:
    predicted = predict_stage(stage, posterior, seed=seed)
    tail = (1 - LEVEL) / 2
    row: dict[str, Any] = {
        "stage": stage.name,
        "model": shapes.describe_checkpoint(stage.model).name,
        "rate_per_s": stage.rate_per_s,
        "is_overloaded": stage.is_overloaded,
        "is_fitted": stage.name in posterior.stages,
    }
    end_to_end_s = float(np.median(predicted.end_to_end_s.mean))
    sizes = LoadSizes.of_stage(stage, end_to_end_s)
    outside = find_outside_sizes(posterior.fitted_sizes, sizes)
    row["outside_fitted"] = {name: x._asdict() for name, x in outside.items()}
    for key, (field, compared) in _STATISTIC_OF_COLUMN.items():
        summary: LatencySummary = getattr(predicted, field)
        real: LatencySummary | None = getattr(stage, field)
        intervals = {
            name: np.quantile(values, [tail, 1 - tail]).tolist()
            for name, values in summary._asdict().items()
        }
        middle = {
            name: float(np.median(values)) for name, values in summary._asdict().items()
        }
        row[key] = middle | {
            "compared": compared,
            "interval": intervals,
            "measured": None if real is None else real._asdict(),
            "error": None,
            "covered": None,
        }
        if real is not None:
            value, (low, high) = getattr(real, compared), intervals[compared]
            row[key]["error"] = middle[compared] / value - 1
            row[key]["covered"] = bool(low <= value <= high)
    return row


def stage_sheet(document: dict[str, Any]) -> Sheet:
    """Returns the table of predictions, with errors if there are measured values."""
    rows = document["rows"]
    has_measured = rows[0]["e2e_s"]["measured"] is not None
    error = ["error"] if has_measured else []
    heads = ["model", "rate [1/s]", "end to end mean [s]", *error]
    heads += ["first token median [ms]", *error]
    cells = []
    for row in rows:
        mark = " *" if row["is_overloaded"] else ""
        cell = [row["model"] + mark, format_rate(row["rate_per_s"])]
        for key, scale in (("e2e_s", 1.0), ("ttft_s", 1e3)):
            estimate = row[key]
            cell.append(format_estimate(estimate, estimate["compared"], scale))
            if has_measured:
                cell.append(f"{100 * estimate['error']:+.1f} %")
        cells.append(tuple(cell))
    note = f"Median of the draws, and the interval that holds {100 * LEVEL:.0f} %."
    if any(row["is_overloaded"] for row in rows):
        note += " *: overloaded, so the clients gave up; not judged."
    return Sheet("Predicted stages", heads, cells, note)


def judgement_sheet(document: dict[str, Any], posterior: ServerPosterior) -> Sheet:
    """Returns the table of errors and coverage, and of the fitted data."""
    rows = []
    if "coverage" in document:
        num = document["num_judged"]
        for key, name in (("e2e_s", "end to end mean"), ("ttft_s", "first token")):
            covered = round(num * document["coverage"][key])
            rows.append(
                (
                    name,
                    f"error {100 * document['median_error'][key]:.1f} % in the median, "
                    f"{100 * document['largest_error'][key]:.1f} % at most; "
                    f"{100 * LEVEL:.0f} % intervals hold {covered} of {num}",
                )
            )
    num_fitted = sum(row["is_fitted"] for row in document["rows"])
    named = f"{num_fitted} of {len(document['rows'])} rows are among the fitted stages"
    rows += [("rows", named), *fitted_rows(posterior)]
    for row in document["rows"]:
        outside = {k: OutsideSize(**x) for k, x in row["outside_fitted"].items()}
        rows += [
            ("load", f"warning: {row['stage']}: {line}")
            for line in describe_outside(outside)
        ]
    return Sheet("Basis", ("", ""), rows)
