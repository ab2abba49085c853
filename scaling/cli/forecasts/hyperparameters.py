"""Fits learning rate and batch size, predicts the best pair, and scores it."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.progress import QUIET, Progress
from jaxkv.report import (
    ReportPart,
    Sheet,
    dumps,
    numbered_list,
)
from scaling.cli.curves import HELD_OUT, PREDICTED
from scaling.cli.forecasts.config import (
    HYPERPARAMETERS,
    HyperparameterConfig,
    split_targets,
)
from scaling.cli.forecasts.downstream import ForecastFits, table_text
from scaling.fits import FitResult, predict
from scaling.forecasts import (
    PAIR_CHOICES,
    SURFACE,
    RateBatchFit,
    choose_pairs,
    fit_lowest_losses,
    fit_rate_batch,
    lost_by_miss,
    predict_rate_batch,
    score_pair,
)
from scaling.logs import RunSize, TunedCell, TunedColumns, read_tuned_runs

SURFACE_FORMULA = (
    "ln loss = floor(N, D) + (p w + s v)^2 + (q v)^2, w = (exp(skew u) - 1) / skew, "
    "u = ln(rate / best rate), v = ln(batch / best batch)"
)
_SAME = 0.02
"""Largest relative difference of N and D of one cell."""
_MISSES = (
    ("rate / 2", 0.5, 1.0),
    ("rate x 2", 2.0, 1.0),
    ("batch / 2", 1.0, 0.5),
    ("batch x 2", 1.0, 2.0),
    ("both / 2", 0.5, 0.5),
    ("both x 2", 2.0, 2.0),
)


def fit_tuned_file(
    config: HyperparameterConfig, progress: Progress = QUIET
) -> ForecastFits:
    """Reads runs, fits the surface, and predicts the best pair at every size.

    Raises:
      ValueError: a file, a rule or a size cannot be used.
    """
    columns = TunedColumns(
        **{name: getattr(config, name) for name in TunedColumns.__annotations__}
    )
    sizes, tables = split_targets(config.predict)
    read = functools.partial(read_tuned_runs, columns=columns, where=config.where)
    cells, num_dropped = read(config.log, hold_out=config.hold_out)
    fitted = [cell for cell in cells if not cell.is_held_out]
    targets: list[tuple[str, RunSize, TunedCell | None]] = [
        (HELD_OUT, cell.size, cell) for cell in cells if cell.is_held_out
    ]
    for size in sizes:
        targets.append((PREDICTED, size, _find_cell(cells, size)))
    for path in tables:
        others, more_dropped = read(path)
        num_dropped += more_dropped
        targets += [(PREDICTED, cell.size, cell) for cell in others]
    progress.show("surface")
    fit = fit_rate_batch(fitted)
    loss_law = fit_lowest_losses(fit)
    warnings = [*fit.warnings]
    if num_dropped:
        warnings.append(f"{num_dropped} runs have no finite loss and are left out")
    predictions = [
        _prediction(fit, loss_law, fitted, config, *target) for target in targets
    ]
    document = {
        "law": HYPERPARAMETERS,
        "formula": SURFACE_FORMULA,
        "source": "powers as in Li et al. 2025, arXiv:2503.04715",
        "level": config.level,
        "log": config.log,
        "rate": fit.rate._asdict(),
        "batch": fit.batch._asdict(),
        "valley": fit.valley._asdict(),
        "median_residual": fit.median_residual,
        "num_runs": fit.num_runs,
        "lowest_loss": None if loss_law is None else loss_law.coefficients,
        "cells": [
            {
                "num_params": cell.size.num_params,
                "num_tokens": cell.size.num_tokens,
                "rate": float(cell.rate[cell.best]),
                "batch": float(cell.batch[cell.best]),
                "loss": float(cell.loss[cell.best]),
                "fitted_rate": fit.rate.value(cell.size),
                "fitted_batch": fit.batch.value(cell.size),
            }
            for cell in fitted
        ],
        "predictions": predictions,
        "scores": _scores(predictions),
        "warnings": warnings,
    }
    return ForecastFits(document=dumps(document))


def _find_cell(cells: Sequence[TunedCell], size: RunSize) -> TunedCell | None:
    """Returns the cell of a size, up to 2 %."""
    for cell in cells:
        if (np.abs(np.log(np.divide(cell.size, size))) < _SAME).all():
            return cell
    return None


def _prediction(
    fit: RateBatchFit,
    loss_law: FitResult | None,
    fitted: Sequence[TunedCell],
    config: HyperparameterConfig,
    role: str,
    size: RunSize,
    cell: TunedCell | None,
) -> dict[str, Any]:
    """Returns the prediction at a size, and its score in a measured cell."""
    best = predict_rate_batch(fit, size, level=config.level)
    loss = low = high = None
    if loss_law is not None:
        data = {"num_params": [size.num_params], "num_tokens": [size.num_tokens]}
        values = predict(loss_law, data, "prediction", config.level)
        loss, low, high = (float(x[0]) for x in values)
    pairs = choose_pairs(fit, fitted, size, config.batch_tokens)
    return {
        "size": size.label,
        "num_params": size.num_params,
        "num_tokens": size.num_tokens,
        "role": "fitted" if any(cell is x for x in fitted) else role,
        "rate": best.rate,
        "rate_low": best.rate_interval[0],
        "rate_high": best.rate_interval[1],
        "batch": best.batch,
        "batch_low": best.batch_interval[0],
        "batch_high": best.batch_interval[1],
        "loss": loss,
        "loss_low": low,
        "loss_high": high,
        "lost_by_miss": {
            name: lost_by_miss(fit, size, best.rate * x, best.batch * y)
            for name, x, y in _MISSES
        },
        "pairs": {
            name: {"rate": rate, "batch": batch}
            for name, (rate, batch) in pairs.items()
        },
        "measured": None if cell is None else _measured(fit, cell, pairs),
    }


def _measured(
    fit: RateBatchFit, cell: TunedCell, pairs: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """Returns the measured pair nearest to each pair, and the loss that it loses."""
    best = cell.best
    excess = cell.loss / cell.loss[best] - 1
    return {
        "best_rate": float(cell.rate[best]),
        "best_batch": float(cell.batch[best]),
        "best_loss": float(cell.loss[best]),
        "nearest": {
            name: score_pair(cell, *pair)._asdict() for name, pair in pairs.items()
        },
        "runs": [
            {
                "rate": float(rate),
                "batch": float(batch),
                "lost": float(lost),
                "predicted_lost": lost_by_miss(fit, cell.size, rate, batch),
            }
            for rate, batch, lost in zip(cell.rate, cell.batch, excess, strict=True)
            if lost < _DRAWN_LOSS
        ],
    }


_DRAWN_LOSS = 0.02


def _scores(predictions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns mean and worst loss lost, and factors of error, of unfitted cells."""
    cells = [
        x["measured"]["nearest"]
        for x in predictions
        if x["measured"] is not None and x["role"] != "fitted"
    ]
    if not cells:
        return {}
    return {
        name: {
            "num_cells": len(cells),
            "mean_lost": float(np.mean([cell[name]["lost"] for cell in cells])),
            "worst_lost": max(cell[name]["lost"] for cell in cells),
            "rate_factor": _mean_factor([cell[name]["rate_factor"] for cell in cells]),
            "batch_factor": _mean_factor(
                [cell[name]["batch_factor"] for cell in cells]
            ),
        }
        for name in PAIR_CHOICES
    }


def _mean_factor(factors: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(factors))))


def metrics(result: ForecastFits) -> dict[str, Any]:
    """Returns the document."""
    return json.loads(result.document)


def summary(result: ForecastFits) -> list[ReportPart]:
    """Returns tables of the law, predictions, misses and scores."""
    document = json.loads(result.document)
    rows = [
        (
            f"best {name}",
            f"{x['scale']:.4g}",
            f"{x['n_exponent']:+.3f}",
            f"{x['d_exponent']:+.3f}",
        )
        for name, x in (("rate", document["rate"]), ("batch", document["batch"]))
    ]
    valley = ", ".join(f"{name} {x:.4g}" for name, x in document["valley"].items())
    note = (
        f"Powers scale N^x D^y. {document['formula']}: {valley}. {document['source']}. "
        f"{document['num_runs']} runs of {len(document['cells'])} cells; median "
        f"residual {_percent(document['median_residual'])}."
    )
    heads = ("law", "scale", "exponent of N", "exponent of D")
    parts: list[ReportPart] = [Sheet(HYPERPARAMETERS, heads, rows, note)]
    if document["predictions"]:
        parts += _best_pairs(document)
        parts.append(_misses(document["predictions"][-1]))
    if document["scores"]:
        rows = [
            (
                name,
                f"{x['num_cells']}",
                _percent(x["mean_lost"]),
                _percent(x["worst_lost"]),
                f"{x['rate_factor']:.2f}",
                f"{x['batch_factor']:.2f}",
            )
            for name, x in document["scores"].items()
        ]
        heads = ("pair", "cells", "mean lost", "worst lost", "rate off", "batch off")
        note = (
            "Loss of the measured pair nearest to the predicted one, over the lowest "
            "of its cell. Factors of error are geometric means, to the best pair. "
            "Nearest cell copies the best pair of the nearest fitted size; mean pair "
            "is the geometric mean of all."
        )
        parts.append(Sheet("loss lost in cells not fitted", heads, rows, note))
    return [*parts, numbered_list("warnings", document["warnings"])]


def _best_pairs(document: Mapping[str, Any]) -> list[Sheet]:
    """Returns the predicted pairs, and the measured ones where there are some."""
    predictions = document["predictions"]
    rows = [
        (
            x["size"],
            f"{x['rate']:.3g}",
            _range(x["rate_low"], x["rate_high"], ".3g"),
            f"{x['batch']:.0f}",
            _range(x["batch_low"], x["batch_high"], ".0f"),
            "-" if x["loss"] is None else f"{x['loss']:.4f}",
        )
        for x in predictions
    ]
    interval = f"{document['level']:.0%} interval"
    heads = ("N:D", "best rate", interval, "best batch", interval, "loss")
    note = "Intervals of the best measured pair; batches in the unit of the log."
    sheets = [Sheet("best pairs", heads, rows, note)]
    rows = [
        (
            x["size"],
            x["role"],
            _pair(x["measured"]["nearest"][SURFACE], "rate", "batch"),
            _percent(x["measured"]["nearest"][SURFACE]["lost"]),
            _pair(x["measured"], "best_rate", "best_batch"),
        )
        for x in predictions
        if x["measured"] is not None
    ]
    if rows:
        heads = ("N:D", "role", "nearest measured", "lost", "best measured")
        note = "Learning rate and batch size of measured pairs."
        sheets.append(Sheet("measured pairs", heads, rows, note))
    return sheets


def _range(low: float | None, high: float | None, style: str) -> str:
    """Returns an interval as text; "unknown" if it is infinite."""
    if low is None or high is None:
        return "unknown"
    return f"{low:{style}} to {high:{style}}"


def _pair(values: Mapping[str, float], rate: str, batch: str) -> str:
    return f"{values[rate]:.3g}, {values[batch]:g}"


def _misses(prediction: Mapping[str, Any]) -> Sheet:
    rows = [(x, _percent(y)) for x, y in prediction["lost_by_miss"].items()]
    note = f"At {prediction['size']}; the same at every size by this law."
    return Sheet("loss lost by a miss", ("miss", "lost"), rows, note)


def _percent(value: float) -> str:
    return f"{100 * value:.3f} %"


def surface_files(result: ForecastFits) -> dict[str, str]:
    """Returns `fit.json`, and the predictions as a table."""
    document = json.loads(result.document)
    nested = ("lost_by_miss", "pairs", "measured")
    plain = [
        {name: y for name, y in x.items() if name not in nested}
        for x in document["predictions"]
    ]
    return {"fit.json": result.document, "predictions.csv": table_text(plain)}
