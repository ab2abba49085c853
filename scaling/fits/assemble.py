"""Assembles the result of a fit: natural units, intervals, exponents, warnings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from scaling import laws
from scaling.fits import diagnostics, forecasts, intervals
from scaling.fits.levenberg_marquardt import FitProblem
from scaling.fits.result import FitResult
from scaling.laws import Exponents, Law, coefficient_slopes, optimal_exponents


def assemble_result(
    problem: FitProblem,
    data: Mapping[str, Any],
    start_summary: diagnostics.StartSummary,
    best: Float[np.ndarray, " k"],
    objective: float,
    level: float,
) -> FitResult:
    """Describes an optimum, with intervals from the curvature.

    Args:
      problem: the fit problem.
      data: columns of the runs.
      start_summary: summary of the starts.
      best: coordinates of the optimum.
      objective: sum of losses at the optimum.
      level: probability of the intervals.
    """
    law = problem.law
    runs = problem.runs
    names = law.coefficients
    centre = runs.centre
    n = runs.num_points
    k = int(problem.free.sum())
    matrix, covariance = intervals.curvature(problem, best)
    slopes = coefficient_slopes(law, best, centre)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite variances
        covariance = slopes @ covariance @ slopes.T
    natural = laws.coefficients(law, best[None], centre)[0]
    residuals = laws.values(law, best[None], runs.logs)[0] - runs.target
    condition_number, flat_directions = diagnostics.curvature_shape(problem, matrix)
    quantile = intervals.student_t(level, max(1, n - k))
    half = quantile * _spread(covariance)
    # A size is symmetric in its logarithm, and stays positive.
    logged = np.array([c.log for c in law.coordinates])
    share = (natural + half - natural) / np.where(logged, natural, 1.0)
    ratio = np.exp(np.where(logged, np.minimum(share, 700), 0.0))
    with np.errstate(over="ignore"):  # infinite upper ends
        low = np.where(logged, natural / ratio, natural - half)
        high = np.where(logged, natural * ratio, natural + half)
    exponents = {}
    exponent_intervals = {}
    if law.two_powers is not None:
        value = _exponents(law, natural)
        # A central difference; its step is far above rounding and far below any curve.
        steps = np.diag(1e-6 * np.maximum(np.abs(natural), 1e-12))
        columns = [
            (_exponents(law, natural + x) - _exponents(law, natural - x))
            / (2 * x.sum())
            for x in steps
        ]
        slope = np.stack(columns, 1)
        half = quantile * _spread(slope @ covariance @ slope.T)
        exponents = dict(zip(Exponents._fields, map(float, value), strict=True))
        exponent_intervals = _pairs(Exponents._fields, value - half, value + half)
    columns = {x: np.asarray(data[x], float) for x in (*law.inputs, law.target)}
    if {"num_params", "num_tokens"} <= columns.keys():
        columns["flops"] = 6 * columns["num_params"] * columns["num_tokens"]
    noise = residuals * np.sqrt(n / max(1, n - k))
    result = FitResult(
        law=law.name,
        inputs=law.inputs,
        coefficients=dict(zip(names, map(float, natural), strict=True)),
        objective=objective,
        status=start_summary.statuses[start_summary.best],
        statuses=start_summary.statuses,
        distinct_minima=start_summary.distinct_minima,
        covariance=covariance,
        intervals=_pairs(names, low, high),
        samples=None,
        condition_number=condition_number,
        flat_directions=flat_directions,
        bounds_hit=diagnostics.find_bounds_hit(problem, best),
        warnings=[],
        num_points=n,
        residuals=residuals,
        exponents=exponents,
        exponent_intervals=exponent_intervals,
        held_out=None,
        loss=problem.objective.loss,
        delta=problem.objective.delta,
        space=problem.objective.space,
        level=level,
        coordinates=best,
        centre=centre,
        noise=noise,
        ranges={x: (float(y.min()), float(y.max())) for x, y in columns.items()},
        forecast_variance=forecasts.measure_forecasts(problem, best),
    )
    return result._replace(warnings=diagnostics.list_warnings(problem, result))


def add_resamples(
    problem: FitProblem, result: FitResult, samples: Float[np.ndarray, "resamples k"]
) -> FitResult:
    """Returns a result with intervals and warnings from resamples.

    Args:
      problem: the fit problem.
      result: result whose coordinates are those of the problem's law.
      samples: coordinates of the resamples.
    """
    law = problem.law
    centre = problem.runs.centre
    natural = laws.coefficients(law, result.coordinates[None], centre)[0]
    sampled = laws.coefficients(law, samples, centre)

    def interval(
        value: np.ndarray, several: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return intervals.percentile_intervals(
            value,
            several,
            result.level,
            loss=problem.objective.loss,
            num_points=problem.runs.num_points,
            k=int(problem.free.sum()),
        )

    exponent_intervals = {}
    if law.two_powers is not None:
        several = _exponents(law, sampled.T).T
        ends = interval(_exponents(law, natural), several)
        exponent_intervals = _pairs(Exponents._fields, *ends)
    names = law.coefficients
    result = result._replace(
        coefficients=dict(zip(names, map(float, natural), strict=True)),
        intervals=_pairs(names, *interval(natural, sampled)),
        samples=samples,
        exponent_intervals=exponent_intervals,
        held_out=None,
    )
    return result._replace(warnings=diagnostics.list_warnings(problem, result))


def _exponents(
    law: Law, natural: Float[np.ndarray, "k ..."]
) -> Float[np.ndarray, "2 ..."]:
    """Returns the exponents of the compute optimum of natural coefficients."""
    named = dict(zip(law.coefficients, natural, strict=True))
    return np.stack(optimal_exponents(law, named))


def _spread(covariance: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(np.diagonal(covariance), 0))


def _pairs(
    names: Sequence[str], low: np.ndarray, high: np.ndarray
) -> dict[str, tuple[float, float]]:
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(names)}
