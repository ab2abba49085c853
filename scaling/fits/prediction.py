"""Predictions of a fit for other runs, and their scores."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from scaling import laws
from scaling.fits import diagnostics, forecasts, intervals
from scaling.fits.result import FitResult, HeldOut
from scaling.laws import Law, coefficient_slopes

Kind = Literal["confidence", "prediction"]
_MAX_NUMBERS = 2**24
"""Numbers of resamples times points that are evaluated at a time."""
_ROUNDING = 1e-9
"""Rounding of ln(compute)."""
MAX_SCORED = 4096
"""Held-out runs whose intervals are computed; evenly selected from more."""


class Prediction(NamedTuple):
    """Values of a law's target for given inputs.

    Attributes:
      loss: predicted target.
      low: lower end of the interval; NaN without an interval.
      high: upper end of the interval.
    """

    loss: Float[np.ndarray, " n"]
    low: Float[np.ndarray, " n"]
    high: Float[np.ndarray, " n"]


@validation.checks_numbers(level="(0, 1)")
def predict(
    result: FitResult,
    data: Mapping[str, Any],
    interval: Kind | None = None,
    level: float = 0.9,
) -> Prediction:
    """Evaluates a fitted law, inside the fitted range or beyond.

    Args:
      result: the fit.
      data: a positive column for each of its inputs.
      interval: `confidence` for the law's value, `prediction` for a run, with its
        residual and, with more compute than the fitted runs, the error of forecasts
        (`FitResult.forecast_variance`). Computed from the resamples if there are some,
        else from the curvature.
      level: probability of the interval, in (0, 1).

    Raises:
      ValueError: a column is missing or not positive, or an argument is out of range.
    """
    law = result.find_law()
    if interval not in (None, "confidence", "prediction"):
        raise ValueError(f"{interval=} must be None, 'confidence' or 'prediction'")
    logs = _logs(law, data)
    beyond = _forecast_variance(result, law, logs)
    logs = logs - result.centre[:, None]
    value = laws.values(law, result.coordinates[None], logs)[0]
    if interval is None:
        nothing = np.full(value.shape, np.nan)
        return Prediction(np.exp(value), nothing, nothing)
    if result.samples is None:
        at = result.coordinates
        natural = coefficient_slopes(law, at, result.centre)
        slopes = laws.slopes(law, at, logs) @ np.linalg.inv(natural)
        variance = np.einsum("ni,ij,nj->n", slopes, result.covariance, slopes)
        if interval == "prediction":
            variance = variance + np.mean(result.noise**2)
        freedom = max(1, result.num_points - result.num_free)
        square = intervals.student_t(level, freedom) ** 2 * np.maximum(variance, 0)
        if interval == "prediction":
            square += (
                intervals.student_t(level, forecasts.FORECAST_FREEDOM) ** 2 * beyond
            )
        half = np.sqrt(square)
        return Prediction(np.exp(value), np.exp(value - half), np.exp(value + half))
    # A residual for every resample and point, drawn with a fixed seed, so that the
    # result is deterministic.
    rng = np.random.default_rng(0)
    ends = []
    step = max(1, _MAX_NUMBERS // len(result.samples))
    for first in range(0, len(value), step):
        chunk = slice(first, first + step)
        samples = laws.values(law, result.samples, logs[:, chunk])
        if interval == "prediction":
            samples = samples - rng.choice(result.noise, samples.shape)
            if beyond[chunk].any():
                spread = np.sqrt(beyond[chunk])
                draws = rng.standard_t(forecasts.FORECAST_FREEDOM, samples.shape)
                samples = samples + spread * draws
        ends.append(
            intervals.percentile_intervals(
                value[chunk],
                samples,
                level,
                loss=result.loss,
                num_points=result.num_points,
                k=result.num_free,
            )
        )
    low, high = map(np.concatenate, zip(*ends, strict=True))
    return Prediction(np.exp(value), np.exp(low), np.exp(high))


def predict_samples(
    result: FitResult, data: Mapping[str, Any]
) -> Float[np.ndarray, "resamples n"]:
    """Evaluates the law of every resample, without residuals.

    Args:
      result: a fit with resamples.
      data: a positive column for each of its inputs.

    Raises:
      ValueError: the fit has no resamples, or a column is missing or not positive.
    """
    if result.samples is None:
        raise ValueError("result must have resamples, see fits.bootstrap")
    law = result.find_law()
    logs = _logs(law, data) - result.centre[:, None]
    return np.exp(laws.values(law, result.samples, logs))


def score(result: FitResult, data: Mapping[str, Any]) -> FitResult:
    """Scores a fit on held-out runs; adds a warning if they contradict its intervals.

    Args:
      result: the fit.
      data: a column for each of its inputs, and one for its target; at least one run.

    Returns:
      The fit with `FitResult.held_out`; with resamples, also the share of the runs
      inside their intervals.

    Raises:
      ValueError: a column is missing, an input is not positive, or there is no run.
    """
    law = result.find_law()
    law.check_columns(data, (*law.inputs, law.target))
    targets = np.asarray(data[law.target], float)
    if not targets.size:
        raise ValueError("data has no row: at least one run must be scored")
    error = np.log(predict(result, data).loss / targets)
    covered = None
    if result.samples is not None:
        rows = np.arange(len(targets))
        if len(rows) > MAX_SCORED:
            rows = np.linspace(0, len(rows) - 1, MAX_SCORED).round().astype(int)
        inputs = {name: np.asarray(data[name])[rows] for name in law.inputs}
        prediction = predict(result, inputs, "prediction")
        row_targets = targets[rows]
        covered = float(
            np.mean((prediction.low <= row_targets) & (row_targets <= prediction.high))
        )
    size = np.abs(error)
    held_out = HeldOut(
        num_points=len(targets),
        mean_error=float(size.mean()),
        worst_error=float(size.max()),
        last_error=float(error[np.argmax(run_flops(law, data))]),
        covered=covered,
    )
    doubts = diagnostics.held_out_warnings(held_out, result.warnings)
    return result._replace(held_out=held_out, warnings=[*result.warnings, *doubts])


def score_held_out(result: FitResult, data: Mapping[str, Any]) -> FitResult:
    """Returns `score(result, data)`, with a DeprecationWarning about its new name."""
    warnings.warn(
        "fits.score_held_out is now called fits.score", DeprecationWarning, stacklevel=2
    )
    return score(result, data)


def run_flops(law: Law, data: Mapping[str, Any]) -> Float[np.ndarray, " n"]:
    """Returns the FLOPs of runs: the column `flops`, 6 N D, or the first input."""
    if "flops" in data:
        return np.asarray(data["flops"], float)
    if {"num_params", "num_tokens"} <= data.keys():
        sizes = (np.asarray(data[x], float) for x in ("num_params", "num_tokens"))
        return 6 * next(sizes) * next(sizes)
    return np.asarray(data[law.inputs[0]], float)


def _forecast_variance(result: FitResult, law: Law, logs: np.ndarray) -> np.ndarray:
    """Returns the variance of forecasts; 0 for runs within the fitted compute."""
    last = result.ranges.get("flops") or result.ranges[law.inputs[0]]
    distance = forecasts.log_compute(law, logs) - np.log(last[1])
    constant, slope = result.forecast_variance
    return np.where(distance > _ROUNDING, constant + slope * distance, 0.0)


def _logs(law: Law, data: Mapping[str, Any]) -> np.ndarray:
    columns = []
    law.check_columns(data, law.inputs)
    for name in law.inputs:
        column = np.atleast_1d(np.asarray(data[name], float))
        if not (np.isfinite(column) & (column > 0)).all():
            raise ValueError(f"{name} must be positive and finite")
        columns.append(column)
    return np.log(np.stack(np.broadcast_arrays(*columns)))
