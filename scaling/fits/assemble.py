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
    samples: Float[np.ndarray, "resamples k"] | None,
    level: float,
) -> FitResult:
    """Describes an optimum.

    Args:
      problem: the fit problem.
      data: columns of the runs.
      start_summary: summary of the starts.
      best: coordinates of the optimum.
      objective: sum of losses at the optimum.
      samples: coordinates of the resamples.
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

    def interval(value: Any, spread: Any, sampled: Any) -> Any:
        if samples is None:
            half = intervals.student_t(level, max(1, n - k)) * spread
            return value - half, value + half
        size = {"loss": problem.loss, "num_points": n, "k": k}
        return intervals.percentile_intervals(value, sampled, level, **size)

    sampled = None
    if samples is not None:
        sampled = laws.coefficients(law, samples, centre)
    ends = interval(natural, _spread(covariance), sampled)
    if samples is None:
        # A size is symmetric in its logarithm, and stays positive.
        logged = np.array([c.log for c in law.coordinates])
        share = (ends[1] - natural) / np.where(logged, natural, 1.0)
        ratio = np.exp(np.where(logged, np.minimum(share, 700), 0.0))
        with np.errstate(over="ignore"):  # infinite upper ends
            low = natural / ratio
            high = natural * ratio
        ends = np.where(logged, low, ends[0]), np.where(logged, high, ends[1])
    noise = residuals * np.sqrt(n / max(1, n - k))
    exponents, exponent_ends = _exponents(law, natural, covariance, sampled, interval)
    columns = {x: np.asarray(data[x], float) for x in (*law.inputs, law.target)}
    if {"num_params", "num_tokens"} <= columns.keys():
        columns["flops"] = 6 * columns["num_params"] * columns["num_tokens"]
    result = FitResult(
        law=law.name,
        inputs=law.inputs,
        coefficients=dict(zip(names, map(float, natural), strict=True)),
        objective=objective,
        status=start_summary.statuses[start_summary.best],
        statuses=start_summary.statuses,
        distinct_minima=start_summary.distinct_minima,
        covariance=covariance,
        intervals=_pairs(names, ends),
        samples=samples,
        condition_number=condition_number,
        flat_directions=flat_directions,
        bounds_hit=diagnostics.find_bounds_hit(problem, best),
        warnings=[],
        num_points=n,
        residuals=residuals,
        exponents=exponents,
        exponent_intervals=exponent_ends,
        held_out=None,
        loss=problem.loss,
        delta=problem.delta,
        space=problem.space,
        level=level,
        coordinates=best,
        centre=centre,
        noise=noise,
        ranges={x: (float(y.min()), float(y.max())) for x, y in columns.items()},
        forecast_variance=forecasts.measure_forecasts(problem, best, noise),
    )
    return result._replace(warnings=diagnostics.list_warnings(problem, result))


def _exponents(
    law: Law, natural: Any, covariance: Any, sampled: Any, interval: Any
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Returns the exponents of the compute optimum and their intervals."""
    if law.two_powers is None:
        return {}, {}

    def compute(x: np.ndarray) -> np.ndarray:
        return np.stack(
            optimal_exponents(law, dict(zip(law.coefficients, x, strict=True)))
        )

    value = compute(natural)
    # A central difference; its step is far above rounding and far below any curve.
    steps = np.diag(1e-6 * np.maximum(np.abs(natural), 1e-12))
    slopes = [
        (compute(natural + x) - compute(natural - x)) / (2 * x.sum()) for x in steps
    ]
    slope = np.stack(slopes, 1)
    several = None if sampled is None else compute(sampled.T).T
    ends = interval(value, _spread(slope @ covariance @ slope.T), several)
    names = Exponents._fields
    return dict(zip(names, map(float, value), strict=True)), _pairs(names, ends)


def _spread(covariance: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(np.diagonal(covariance), 0))


def _pairs(names: Sequence[str], ends: Any) -> dict[str, tuple[float, float]]:
    low, high = ends
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(names)}
