"""Robust fits of scaling laws from many starts, with intervals and warnings.

Public functions: `fit`; then `bootstrap`, `score`, `predict` and `compare`; `to_json`
and `from_json`.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv import validation
from scaling import laws
from scaling.fits import assemble, diagnostics, intervals, levenberg_marquardt
from scaling.fits.equal_loss import Comparison, compare
from scaling.fits.levenberg_marquardt import (
    HUBER,
    FitProblem,
    Objective,
    Report,
    Solution,
)
from scaling.fits.observations import Observations, make_observations
from scaling.fits.prediction import Prediction, predict, score
from scaling.fits.restrictions import (
    UNRESTRICTED,
    Restrictions,
    coordinate_limits,
    from_restricted,
    refuse_high_floor,
    restrict_law,
    to_restricted,
)
from scaling.fits.result import FitResult, HeldOut, from_json, to_json
from scaling.laws import Law

__all__ = [
    "Comparison",
    "FitResult",
    "HeldOut",
    "Objective",
    "Prediction",
    "Restrictions",
    "bootstrap",
    "compare",
    "fit",
    "from_json",
    "predict",
    "score",
    "to_json",
]


def _reads_former_keywords[**P](
    function: Callable[P, FitResult],
) -> Callable[P, FitResult]:
    """Decorates `fit` to translate its former keywords, with a DeprecationWarning."""

    @functools.wraps(function)
    def translated(*args: Any, **keywords: Any) -> FitResult:
        if keywords.keys() & _FORMER_KEYWORDS:
            return _fit_with_former_keywords(*args, **keywords)
        return function(*args, **keywords)

    return translated


@_reads_former_keywords
@validation.checks_numbers(level="(0, 1)")
def fit(
    law: Law,
    data: Mapping[str, Any],
    *,
    objective: Objective = HUBER,
    restrictions: Restrictions = UNRESTRICTED,
    weights: Any = None,
    cluster: Any = None,
    starts: Sequence[Mapping[str, float]] | None = None,
    level: float = 0.9,
) -> FitResult:
    """Fits a law to runs.

    Minimizes the objective from every start, and refines the best end until rounding
    stops it. If two inputs are nearly collinear, starts from the whole box are tried
    too, and reported if one of them is better.

    Args:
      law: a law of `published.LAWS`, or another one.
      data: a column for each of the law's inputs, and one for its target; positive.
      objective: loss and space of the residuals.
      restrictions: fixed and bounded coefficients.
      weights: weights of the rows, at least 0; 1 by default.
      cluster: labels; rows with equal labels are of one run.
      starts: coefficients of further starts, in addition to the law's own.
      level: probability of the intervals, in (0, 1).

    Returns:
      The fit, with intervals from the curvature, and with its problems in `warnings`.

    Raises:
      ValueError: the data cannot be fitted (see `observations.make_observations`), or
        an argument has another type or is outside its range.

    Source: the objective is that of Hoffmann et al. 2022, arXiv:2203.15556,
    section 3.3.
    """
    validation.instance("law", law, Law)
    validation.instance("data", data, Mapping)
    validation.instance("objective", objective, Objective)
    validation.instance("restrictions", restrictions, Restrictions)
    problem = _make_problem(law, data, objective, restrictions, weights, cluster)
    runs = problem.runs
    first = law.starts(runs.level)
    if starts:
        first = np.concatenate([first, _coordinates(law, starts, runs)])
    first = to_restricted(law, problem.law, first, runs.centre)
    few = problem._replace(runs=runs.thinned(levenberg_marquardt.MAX_EXACT_ROWS))
    ends = levenberg_marquardt.solve_weightings(few, _repeat(few, len(first)), first)
    start_summary = diagnostics.compare_starts(few, ends)
    best, minimum = _polish(problem, ends.coordinates[start_summary.best])
    if diagnostics.find_collinear(problem, _NEARLY_COLLINEAR):
        wide = _search_widely(problem)
        other, reached = _polish(problem, wide.coordinates[np.argmin(wide.objective)])
        if reached < minimum * (1 - _BETTER):
            best = other
            minimum = reached
            ends = Solution(*map(np.concatenate, zip(ends, wide, strict=True)))
            start_summary = diagnostics.compare_starts(few, ends)
    result = assemble.assemble_result(
        problem, data, start_summary, best, minimum, level
    )
    result = result._replace(
        fixed=dict(restrictions.fixed), bounds=dict(restrictions.bounds)
    )
    return _unrestrict(law, problem, result)


@validation.checks_numbers(num_resamples=2, seed=validation.SEEDS)
def bootstrap(
    result: FitResult,
    data: Mapping[str, Any],
    *,
    num_resamples: int,
    seed: int = 0,
    law: Law | None = None,
    weights: Any = None,
    cluster: Any = None,
    progress: Report | None = None,
) -> FitResult:
    """Computes the intervals of a fit from resamples of its runs.

    Every resample is fitted from the optimum. With more than 4,096 rows resamples are
    drawn from a normal distribution (`intervals.draw_normal`).

    Args:
      result: the fit.
      data: the columns that were fitted.
      num_resamples: number of resamples, at least 2.
      seed: seed of the resamples.
      law: the law that was fitted, if it is not in `published.LAWS`.
      weights: the weights of the fit.
      cluster: labels; rows with equal labels are resampled together.
      progress: called with the number of completed resamples.

    Returns:
      The fit with `samples`, and with intervals of the same level and warnings that
      follow from them. A score of held-out runs is left out, since it depends on the
      intervals.

    Raises:
      ValueError: an argument has another type or is outside its range, or the data or
        the weights are not those of the fit.

    Source: Besiroglu et al. 2024, arXiv:2404.10102.
    """
    validation.instance("result", result, FitResult)
    validation.instance("data", data, Mapping)
    law = result.find_law() if law is None else validation.instance("law", law, Law)
    objective = Objective(result.loss, result.delta, result.space)
    restrictions = Restrictions(result.fixed, result.bounds)
    problem = _make_problem(law, data, objective, restrictions, weights, cluster)
    best = result.optimum
    if best is None:  # read from a file
        coordinates = result.coordinates[None]
        best = to_restricted(law, problem.law, coordinates, problem.runs.centre)[0]
    reached = objective.sum_losses(problem.residuals(best), problem.runs.weights)
    if abs(reached - result.objective) > 1e-12 + 1e-6 * result.objective:  # rounding
        raise ValueError("data and weights must be those of the fit")
    samples = _resample(problem, best, num_resamples, seed, progress)
    result = result._replace(coordinates=best)
    return _unrestrict(law, problem, assemble.add_resamples(problem, result, samples))


_FORMER_VALUES = {
    "objective": (Objective, ("loss", "delta", "space")),
    "restrictions": (Restrictions, ("fixed", "bounds")),
}
_FORMER_KEYWORDS = {
    *("loss", "delta", "space", "fixed", "bounds"),
    *("bootstrap", "seed", "progress", "held_out"),
}


def _fit_with_former_keywords(
    law: Law, data: Mapping[str, Any], **keywords: Any
) -> FitResult:
    """Calls `fit`, `bootstrap` and `score` for the former keywords of `fit`."""
    former = {x: value for x, value in keywords.items() if x in _FORMER_KEYWORDS}
    options = {x: value for x, value in keywords.items() if x not in _FORMER_KEYWORDS}
    # The call shows arguments that may be long by name.
    rows = "".join(f", {x}={x}" for x in ("weights", "cluster") if x in options)
    call = f"fits.fit(law, runs{rows}"
    for name, (kind, field_names) in _FORMER_VALUES.items():
        fields = {x: former[x] for x in field_names if former.get(x) is not None}
        if fields:
            if name in options:
                raise TypeError(f"fit() got both {name}= and {', '.join(fields)}")
            options[name] = kind(**fields)
            listed = ", ".join(f"{x}={value!r}" for x, value in fields.items())
            call += f", {name}=fits.{kind.__name__}({listed})"
    call += ")"
    num_resamples = former.get("bootstrap", 0)
    seed = former.get("seed", 0)
    if num_resamples:
        call = f"fits.bootstrap({call}, runs, {num_resamples=}, {seed=}{rows})"
    mask = former.get("held_out")
    held_out = {}
    if mask is not None:
        call = f"fits.score({call}, held_out_runs)"
        mask = np.asarray(mask, bool)
        if mask.ndim != 1:
            raise ValueError(
                "held_out must be a mask of rows, such as log.select(rule)"
            )
        if not mask.any():
            raise ValueError("held_out has no row: at least one run must be scored")
        held_out = {name: np.asarray(column)[mask] for name, column in data.items()}
        data = {name: np.asarray(column)[~mask] for name, column in data.items()}
        for name in ("weights", "cluster"):
            if options.get(name) is not None:
                options[name] = np.asarray(options[name])[~mask]
    listed = ", ".join(f"{name}=" for name in former)
    warnings.warn(f"fit({listed}) is now {call}", DeprecationWarning, stacklevel=3)
    result = fit(law, data, **options)
    if num_resamples:
        result = bootstrap(
            result,
            data,
            num_resamples=num_resamples,
            seed=seed,
            law=law,
            weights=options.get("weights"),
            cluster=options.get("cluster"),
            progress=former.get("progress"),
        )
    return score(result, held_out) if held_out else result


def _make_problem(
    law: Law,
    data: Mapping[str, Any],
    objective: Objective,
    restrictions: Restrictions,
    weights: Any,
    cluster: Any,
) -> FitProblem:
    """Returns the fit problem in the restricted form of the law."""
    limits = coordinate_limits(law, restrictions)
    num_given = len(restrictions.fixed)
    runs = make_observations(law, data, weights, cluster, num_given=num_given)
    refuse_high_floor(law, limits, runs.target)
    return FitProblem(restrict_law(law, limits, runs.centre), runs, objective, limits)


def _unrestrict(law: Law, problem: FitProblem, result: FitResult) -> FitResult:
    """Returns a result in the law's own coordinates, with exact fixed values."""
    convert = functools.partial(
        from_restricted, law, problem.law, centre=problem.runs.centre
    )
    ends = {name: (value, value) for name, value in result.fixed.items()}
    return result._replace(
        coefficients=result.coefficients | dict(result.fixed),
        intervals=result.intervals | ends,
        coordinates=convert(result.coordinates[None])[0],
        samples=None if result.samples is None else convert(result.samples),
        optimum=result.coordinates,
    )


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
    if problem.objective.loss == "lad":  # the optimizer rounds its corner off
        residuals = problem.residuals(best)
        objective = problem.objective.sum_losses(residuals, weights[0])
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
