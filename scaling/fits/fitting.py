"""Robust fits of scaling laws from many starts, with intervals and warnings.

Public functions: `fit`; then `predict`, `score_fit` and `compare`; `to_json` and
`from_json`.
"""

import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv import validation
from scaling import laws
from scaling.fits import (
    assemble,
    diagnostics,
    intervals,
    levenberg_marquardt,
    prediction,
    restrictions,
)
from scaling.fits.equal_loss import Comparison, compare
from scaling.fits.levenberg_marquardt import (
    DELTA,
    FitProblem,
    Loss,
    Report,
    Solution,
    Space,
)
from scaling.fits.observations import Observations, make_observations
from scaling.fits.prediction import Prediction, predict, score_fit
from scaling.fits.result import FitResult, HeldOut, from_json, to_json
from scaling.laws import Law

__all__ = [
    "Comparison",
    "FitResult",
    "HeldOut",
    "Prediction",
    "compare",
    "fit",
    "from_json",
    "predict",
    "score_fit",
    "score_held_out",
    "to_json",
]


@validation.checks_numbers(
    delta="(-inf, inf)", bootstrap=0, level="(0, 1)", seed=validation.SEEDS
)
def fit(
    law: Law,
    data: Mapping[str, Any],
    *,
    loss: Loss = "huber",
    delta: float = DELTA,
    space: Space = "log",
    weights: Any = None,
    starts: Sequence[Mapping[str, float]] | None = None,
    fixed: Mapping[str, float] | None = None,
    bounds: restrictions.Bounds | None = None,
    bootstrap: int = 0,
    cluster: Any = None,
    level: float = 0.9,
    seed: int = 0,
    held_out: Any = None,
    progress: Report | None = None,
) -> FitResult:
    """Fits a law to runs.

    Minimizes the sum of `loss` over the residuals from every start, and refines the
    best end until rounding stops it. If two inputs are nearly collinear, starts from
    the whole box are tried too, and reported if one of them is better.

    Args:
      law: a law of `published.LAWS`.
      data: a column for each of the law's inputs, and one for its target; positive.
      loss: loss of a residual: `huber`, half its square up to `delta` and linear
        beyond; `lad`, its absolute value; `mse`, half its square.
      delta: threshold of `huber`, at least 1e-12.
      space: `log` for residuals of logarithms, `linear` for those of the target itself.
      weights: weights of the rows, at least 0; 1 by default.
      starts: coefficients of further starts, in addition to the law's own.
      fixed: given coefficients by name; they count as known in intervals and degrees of
        freedom.
      bounds: smallest and largest value of coefficients, by name.
      bootstrap: number of resamples for the intervals, fitted from the optimum; with 0
        the intervals come from the curvature. With more than 4,096 rows resamples are
        drawn from a normal distribution (`intervals.draw_normal`).
      cluster: labels; rows with equal labels are resampled together.
      level: probability of the intervals, in (0, 1).
      seed: seed of the resamples.
      held_out: mask of the rows that are not fitted; the fit is scored on them.
      progress: called with the number of completed resamples.

    Returns:
      The fit, with its problems in `warnings`.

    Raises:
      ValueError: the data cannot be fitted (see `observations.make_observations`), an
        argument has another type or is outside its range, or `held_out` has no row.

    Source: the objective is that of Hoffmann et al. 2022, arXiv:2203.15556,
    section 3.3; the resampled intervals follow Besiroglu et al. 2024, arXiv:2404.10102.
    """
    validation.instance("law", law, Law)
    validation.instance("data", data, Mapping)
    validation.choice("loss", loss, typing.get_args(Loss))
    validation.choice("space", space, typing.get_args(Space))
    if delta < _LEAST_DELTA:
        raise ValueError(
            f"{delta=} must be positive, at least {_LEAST_DELTA}; see loss='lad'"
        )
    if bootstrap == 1:
        raise ValueError(f"{bootstrap=} must be 0 or at least 2 resamples")
    larger = None
    if held_out is not None:
        mask = np.asarray(held_out, bool)
        if mask.ndim != 1:
            raise ValueError(
                "held_out must be a mask of rows, such as log.select(rule)"
            )
        if not mask.any():
            raise ValueError("held_out has no row: at least one run must be scored")
        columns = {name: np.asarray(column) for name, column in data.items()}
        larger = {name: column[mask] for name, column in columns.items()}
        data = {name: column[~mask] for name, column in columns.items()}
        weights, cluster = (
            None if x is None else np.asarray(x)[~mask] for x in (weights, cluster)
        )
    fixed = dict(fixed or {})
    bounds = dict(bounds or {})
    limits = restrictions.coordinate_limits(law, fixed, bounds)
    runs = make_observations(law, data, weights, cluster, num_given=len(fixed))
    restrictions.refuse_high_floor(law, limits, runs.target)
    form = restrictions.restrict_law(law, limits, runs.centre)
    problem = FitProblem(form, runs, loss, float(delta), space, limits)
    first = law.starts(runs.level)
    if starts:
        first = np.concatenate([first, _coordinates(law, starts, runs)])
    first = restrictions.to_restricted(law, form, first, runs.centre)
    few = problem._replace(runs=runs.thinned(levenberg_marquardt.MAX_EXACT_ROWS))
    ends = levenberg_marquardt.solve_weightings(few, _repeat(few, len(first)), first)
    start_summary = diagnostics.compare_starts(few, ends)
    best, objective = _polish(problem, ends.coordinates[start_summary.best])
    if diagnostics.find_collinear(problem, _NEARLY_COLLINEAR):
        wide = _search_widely(problem)
        other, reached = _polish(problem, wide.coordinates[np.argmin(wide.objective)])
        if reached < objective * (1 - _BETTER):
            best = other
            objective = reached
            ends = Solution(*map(np.concatenate, zip(ends, wide, strict=True)))
            start_summary = diagnostics.compare_starts(few, ends)
    samples = None
    if bootstrap:
        samples = _resample(problem, best, bootstrap, seed, progress)
    result = assemble.assemble_result(
        problem, data, start_summary, best, objective, samples, level
    )
    # In the law's own coordinates, with fixed values exact to the bit.
    unrestrict = functools.partial(
        restrictions.from_restricted, law, form, centre=runs.centre
    )
    ends = {name: (value, value) for name, value in fixed.items()}
    result = result._replace(
        coefficients=result.coefficients | fixed,
        intervals=result.intervals | ends,
        coordinates=unrestrict(result.coordinates[None])[0],
        samples=None if samples is None else unrestrict(samples),
        fixed=fixed,
        bounds=bounds,
    )
    return result if larger is None else score_held_out(result, larger)


def score_held_out(result: FitResult, data: Mapping[str, Any]) -> FitResult:
    """Scores a fit on held-out runs; adds a warning if they contradict its intervals.

    Args:
      result: the fit.
      data: columns of at least one run.
    """
    held_out = prediction.score_fit(result, data)
    doubts = diagnostics.held_out_warnings(held_out, result.warnings)
    warnings = [*result.warnings, *doubts]
    return result._replace(held_out=held_out, warnings=warnings)


@validation.checks_numbers(num_rows=0)
def describe_thinning(num_rows: int) -> str:
    """Describes the steps that use a part of `num_rows` rows; "" if none does."""
    max_rows = levenberg_marquardt.MAX_EXACT_ROWS
    if num_rows <= max_rows:
        return ""
    return (
        f"{num_rows:,} rows: laws are fitted to all of them, from starts compared on "
        f"{max_rows:,}; intervals are of a normal law from the slopes of all runs, not "
        "from resamples"
    )


def _resample(
    problem: FitProblem,
    best: np.ndarray,
    num_resamples: int,
    seed: int,
    progress: Report | None,
) -> np.ndarray:
    """Fits resamples from the optimum; for many rows, draws them from a normal."""
    rng = np.random.default_rng(seed)
    runs = problem.runs
    report = progress or (lambda done: None)
    if runs.num_points > levenberg_marquardt.MAX_EXACT_ROWS:
        samples = intervals.draw_normal(problem, best, num_resamples, rng)
        report(num_resamples)
        return samples
    resampled = levenberg_marquardt.solve_weightings(
        problem,
        lambda count: levenberg_marquardt.draw_weights(runs, count, rng),
        np.tile(best, (num_resamples, 1)),
        report=report,
    )
    return resampled.coordinates


_LEAST_DELTA = 1e-12
_NEARLY_COLLINEAR = 0.3
"""Spread of one input, given another, over its whole spread, below which starts are
drawn from the whole box."""
_BETTER = 1e-8
"""Relative decrease of the objective by which such a start is better."""
_NUM_WIDE_STARTS = 256
_NUM_CONTINUED = 32
_MAX_ROUNDS = 6
_MAX_DRAWN_ROWS = 512


def _search_widely(problem: FitProblem) -> Solution:
    """Fits from starts in the whole box, and continues from the best ends.

    If inputs are collinear, optima lie in long valleys and at bounds (a floor of zero,
    a steep term of one run), which the law's own starts miss: on 5 of 24 sets of 8 to
    24 runs, by up to 2.9 %. These starts miss none of them.
    """
    few = problem._replace(runs=problem.runs.thinned(_MAX_DRAWN_ROWS))
    low, high = few.box
    rng = np.random.default_rng(0)
    starts = rng.uniform(low, high, (_NUM_WIDE_STARTS, low.size))
    ends = levenberg_marquardt.solve_weightings(
        few, _repeat(few, _NUM_WIDE_STARTS), starts
    )
    ends = Solution(*(x[np.argsort(ends.objective)[:_NUM_CONTINUED]] for x in ends))
    for _ in range(_MAX_ROUNDS):  # of 300 steps each
        before = ends.objective.min()
        weights = _repeat(few, _NUM_CONTINUED)
        again = levenberg_marquardt.solve_weightings(
            few, weights, ends.coordinates, tolerance=1e-16
        )
        ends = again._replace(num_steps=ends.num_steps + again.num_steps)
        if not ends.objective.min() < before * (1 - _BETTER):
            break
    return ends


def _repeat(problem: FitProblem, num_problems: int) -> np.ndarray:
    return np.tile(problem.runs.weights, (num_problems, 1))


def _polish(problem: FitProblem, start: np.ndarray) -> tuple[np.ndarray, float]:
    """Continues until the objective stops falling; more loosely for many rows."""
    weights = problem.runs.weights[None]
    is_long = problem.runs.num_points > levenberg_marquardt.MAX_EXACT_ROWS
    end = levenberg_marquardt.solve_weightings(
        problem, weights, start[None], tolerance=1e-16 if is_long else 1e-30
    )
    best = end.coordinates[0]
    objective = float(end.objective[0])
    if problem.loss == "lad":  # the optimizer rounds its corner off
        objective = float(weights[0] @ np.abs(problem.residuals(best)))
    return best, objective


def _coordinates(
    law: Law, starts: Sequence[Mapping[str, float]], runs: Observations
) -> np.ndarray:
    """Turns the caller's starts into centred coordinates."""
    rows = []
    for start in starts:
        if set(start) != set(law.coefficients):
            raise ValueError(f"a start needs {', '.join(law.coefficients)}: {start}")
        rows.append([float(start[name]) for name in law.coefficients])
    logged = [c.log for c in law.coordinates]
    values = np.array(rows)
    if not (np.isfinite(values).all() and (values[:, logged] > 0).all()):
        raise ValueError("coefficients to start from must be finite, sizes positive")
    return laws.coordinates(law, values, runs.centre)
