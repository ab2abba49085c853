"""Warnings about a fit: disagreeing starts, bounds, flat directions, misfit."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from scaling import laws
from scaling.fits import goodness, intervals
from scaling.fits.levenberg_marquardt import FitProblem
from scaling.fits.multistart import Solution
from scaling.fits.result import FitResult, HeldOut

# Thresholds of the warnings, set on simulated surfaces: of sound ones, with 32 or 240
# runs and normal or heavy-tailed noise, fewer than one in twenty has a warning; of
# ill-posed ones, nearly all whose intervals miss the truth (experiment `fit_coverage`).
_FREE = 1e-8
"""Share of the largest scaled curvature below which a direction is flat."""
_ILL = 1e6
"""Condition number from which combinations of coefficients are flat."""
_SAME_MINIMUM = 1e-4
"""Difference of log predictions below which two optima count as one."""
_FEW_POINTS_PER_COEFFICIENT = 3
"""Points for each coefficient below which there are few."""
_COLLINEAR = 0.15
"""Spread of one input, given another, over its whole spread."""
_WALL_SHARE = 0.05
"""Share of the resamples that may end at a bound."""
_SMALL_FLOOR = 0.15
"""Floor over the smallest target, below which the floor may be zero."""
_WIDE_RATIO = 5.0
"""Ratio of the ends of an exponent's interval."""
_MAX_CURVE_ROWS = 2**16
"""Rows that are enough to detect a curve in the residuals."""
_WIDE_SHARE = 0.4
"""Width of the interval of an exponent of the optimum, which is in (0, 1)."""


class StartSummary(NamedTuple):
    """How the starts ended: the best one, a status each, how many different optima."""

    best: int
    statuses: list[str]
    distinct_minima: int


def compare_starts(problem: FitProblem, ends: Solution) -> StartSummary:
    """Returns the status of every start, and counts optima of different predictions."""
    low, high = problem.box
    walls = _at_walls(ends.coordinates, low, high)[:, problem.free].any(1)
    settled = (ends.promise < 1e-9) & (ends.damping < 1) & np.isfinite(ends.objective)
    statuses = [
        "abnormal"
        if not np.isfinite(objective)
        else ("bound_hit" if wall else "converged")
        if done
        else "max_iter"
        for objective, wall, done in zip(ends.objective, walls, settled, strict=True)
    ]
    best = int(np.argmin(ends.objective))
    order = np.argsort(ends.objective)
    order = order[settled[order]]
    minima: list[np.ndarray] = []
    if len(order):
        law = problem.law
        logs = problem.runs.logs
        for value in laws.values(law, ends.coordinates[order], logs):
            if all(np.abs(value - other).max() > _SAME_MINIMUM for other in minima):
                minima.append(value)
    return StartSummary(best, statuses, max(1, len(minima)))


def find_bounds_hit(
    problem: FitProblem, coordinates: Float[np.ndarray, " k"]
) -> list[str]:
    """Returns the free coefficients at a bound of the search box."""
    walls = _at_walls(coordinates, *problem.box) & problem.free
    return [n for n, w in zip(problem.law.coefficients, walls, strict=True) if w]


def curvature_shape(
    problem: FitProblem, matrix: Float[np.ndarray, "free free"]
) -> tuple[float, list[dict[str, float]]]:
    """Returns the condition number of the curvature and its flat directions."""
    size, bends, directions = intervals.scaled_bends(matrix)
    ratio = bends / max(bends[-1], 1e-300)
    names = np.array(problem.law.coefficients)[problem.free].tolist()
    flat = []
    for bend, direction in zip(ratio, directions.T, strict=True):
        if bend < _FREE:
            direction = direction / size
            direction = direction / np.linalg.norm(direction)
            flat.append(dict(zip(names, map(float, direction), strict=True)))
    return 1 / max(float(ratio[0]), 1e-17), flat


def find_collinear(
    problem: FitProblem, share_left: float = _COLLINEAR
) -> tuple[str, str] | None:
    """Returns two inputs that are collinear in these runs, or None.

    Args:
      problem: problem with the runs.
      share_left: spread of one input, given the other, over its whole spread, below
        which the inputs are collinear.
    """
    logs = problem.runs.logs
    names = problem.law.inputs
    for i in range(len(logs)):
        for j in range(i):
            a, b = (x - x.mean() for x in (logs[i], logs[j]))
            spread = np.sqrt(np.mean(a * a) * np.mean(b * b))
            share = abs(float(np.mean(a * b))) / max(spread, 1e-300)
            if 1 - min(share, 1.0) ** 2 < share_left**2:
                return names[j], names[i]
    return None


def list_warnings(problem: FitProblem, result: FitResult) -> list[str]:
    """Returns the warnings about a fit; empty for a sound one."""
    n = result.num_points
    k = int(problem.free.sum())
    messages = []
    if n < _FEW_POINTS_PER_COEFFICIENT * k:
        messages.append(f"{n} points are few for {k} coefficients: intervals are rough")
    if names := rising_inputs(problem):
        return [
            *messages,
            f"{problem.law.target} rises with {' and '.join(names)}, and "
            f"{problem.law.name} only falls: is it a loss?",
        ]
    if result.status in ("max_iter", "abnormal"):
        messages.append(
            f"the best start ended as {result.status}: this may be no optimum"
        )
    if pair := find_collinear(problem):
        messages.append(
            f"{pair[1]} follows from {pair[0]} in these runs, so their terms cannot be "
            "separated: vary them separately"
        )
    messages += _walls(problem, result)
    if result.condition_number > _ILL and not result.bounds_hit:
        messages.append(
            f"condition number {result.condition_number:.0e}: "
            "combinations of coefficients are free"
        )
    messages += _wide(problem, result)
    fixed_names = {*problem.fixed_names}
    floor = problem.law.floor
    target = problem.runs.target
    if floor in fixed_names:
        num_below = int(np.sum(target < np.log(result.coefficients[floor])))
        if num_below:
            messages.append(
                f"{floor}={result.coefficients[floor]:.4g} is given, and above "
                f"{num_below} of {n} {problem.law.target} values"
            )
    if floor and floor not in {*result.bounds_hit, *fixed_names}:
        minimum = result.ranges[problem.law.target][0]
        if result.intervals[floor][0] < _SMALL_FLOOR * minimum:
            messages.append(
                f"{floor} may be negligible against the smallest value, {minimum:.4g}: "
                "the data hardly shows whether there is a floor"
            )
    messages += _misfit(problem, result)
    if num_far := _num_outliers(result.residuals):
        points = "point is" if num_far == 1 else "points are"
        messages.append(
            f"{num_far} of {n} {points} far off the law: outliers, or another law"
        )
    return messages


def rising_inputs(problem: FitProblem) -> list[str]:
    """Returns the inputs with which the target rises, if the law can only fall.

    The list is empty unless least squares of logarithms give no input a falling slope
    and explain half of the target's variance.
    """
    law = problem.law
    runs = problem.runs
    falls = any(c.low > 0 and not c.log for c in law.coordinates)
    falls |= any(c.high < 0 and not c.log for c in law.coordinates)
    if not falls or runs.num_points < 3 + len(runs.logs):
        return []
    x = runs.logs - runs.logs.mean(1, keepdims=True)
    y = runs.target - runs.target.mean()
    slopes = np.linalg.lstsq(x.T, y, rcond=1e-6)[0]
    left = y - slopes @ x
    is_rising = (slopes >= 0).all() and left @ left < 0.5 * (y @ y)
    return list(law.inputs) if is_rising else []


def _walls(problem: FitProblem, result: FitResult) -> list[str]:
    """Returns warnings about coefficients at bounds, in the fit or in resamples."""
    names = problem.law.coefficients
    messages = []
    ends = {
        False: ("where the search ends", "the data does not identify"),
        True: ("at the bound that was set", "the data asks for another value"),
    }
    for is_set, (where, why) in ends.items():
        hit = [x for x in result.bounds_hit if (x in problem.limits) is is_set]
        listed = ", ".join(f"{x}={result.coefficients[x]:.4g}" for x in hit)
        are, them = ("is", "it") if len(hit) == 1 else ("are", "them")
        if hit:
            messages.append(
                f"{listed} {are} {where}: {why}{'' if is_set else f' {them}'}"
            )
    if result.samples is None:
        return messages
    at_walls = _at_walls(result.samples, *problem.box) & problem.free
    shares = dict(zip(names, at_walls.mean(0), strict=True))
    for is_set, (where, _) in ends.items():
        hit = [
            x
            for x, share in shares.items()
            if x not in result.bounds_hit
            and share > _WALL_SHARE
            and (x in problem.limits) is is_set
        ]
        if len(hit) == 1:
            messages.append(
                f"{hit[0]} is {where} in {shares[hit[0]]:.0%} of the resamples: the "
                "data hardly identifies it"
            )
        elif hit:
            listed = ", ".join(f"{x} in {shares[x]:.0%}" for x in hit)
            messages.append(
                f"{where} are, of the resamples, {listed}: the data hardly identifies "
                "them"
            )
    return messages


def _misfit(problem: FitProblem, result: FitResult) -> list[str]:
    """Returns warnings about systematic residuals of the fitted runs."""
    law = problem.law
    runs = problem.runs
    messages = []
    if law.target == "loss" and goodness.is_far(result.residuals, runs.target):
        _, p90, worst = goodness.measure_goodness(result.residuals)
        messages.append(
            f"the law misses one run in ten by more than {p90:.1%}, the worst by "
            f"{worst:.0%}: kinds of runs that do not belong together, or another law"
        )
    few = runs.thinned(_MAX_CURVE_ROWS)
    slopes = laws.slopes(law, result.coordinates, few.logs)
    value = laws.values(law, result.coordinates[None], few.logs)[0]
    num_runs = np.unique(few.cluster).size
    if share := goodness.find_arch(value - few.target, slopes, few.logs, num_runs):
        line = (
            f"residuals follow a curve that the law lacks, {share:.0%} of their squares"
        )
        noise = float(np.mean(result.noise**2))
        if sum(result.forecast_variance) > noise:
            error = math.sqrt(noise + sum(result.forecast_variance))
            line += (
                f"; fits to the smaller runs miss those of {math.e:.1f} times the "
                f"compute by {100 * error:.2g} %, residuals are "
                f"{100 * math.sqrt(noise):.2g} %: prediction intervals beyond the "
                "fitted runs are widened"
            )
        messages.append(line)
    return messages


def held_out_warnings(score: HeldOut, warnings: Sequence[str] = ()) -> list[str]:
    """Returns a warning if held-out runs contradict the intervals.

    Args:
      score: score of the held-out runs.
      warnings: warnings of the fit; if its target rises, its intervals are not judged.
    """
    covered = score.covered
    if any("only falls: is it a loss?" in line for line in warnings):
        return []
    if covered is None or not goodness.is_coverage_low(covered, score.num_points):
        return []
    return [
        f"of {score.num_points} held-out runs {covered:.0%} are inside their 90 % "
        "intervals: those are too narrow beyond the runs fitted"
    ]


def _wide(problem: FitProblem, result: FitResult) -> list[str]:
    """Returns warnings about exponents with very wide intervals."""
    messages = []
    open_ = []
    for coordinate in problem.law.coordinates:
        name = coordinate.name
        if coordinate.log or coordinate.low * coordinate.high <= 0:
            continue
        if name in problem.fixed_names:
            continue
        ends = result.intervals[name]
        low, high = sorted(map(abs, ends))
        if name not in result.bounds_hit and (
            ends[0] * ends[1] <= 0 or high > _WIDE_RATIO * low
        ):
            open_.append(f"{name} may be {ends[0]:.3g} or {ends[1]:.3g}")
    if open_:
        messages.append(f"{', '.join(open_)}: hardly known")
    if "a" in result.exponent_intervals:
        low, high = result.exponent_intervals["a"]
        if high - low > _WIDE_SHARE:
            messages.append(
                f"how the optimum grows is hardly known: N* ~ C^{low:.2f} or "
                f"C^{high:.2f}"
            )
    return messages


def _num_outliers(residuals: np.ndarray) -> int:
    """Counts residuals that are improbable even under Student's t with 3 degrees.

    Beyond 40 times the spread of the middle half there is one in 42,000, beyond 8 times
    one in 340. The latter count if they are more than 3 % of the points, the former if
    they are three times as many as expected.
    """
    size = np.abs(residuals) / max(1.4826 * float(np.median(np.abs(residuals))), 1e-9)
    num_far = int(np.sum(size > 8))
    if num_far >= max(2, 0.03 * len(size)):
        return num_far
    num_far = int(np.sum(size > 40))
    return num_far if num_far > 3 * len(size) / 42_000 else 0


def _at_walls(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    room = 1e-9 * (high - low)
    return (x <= low + room) | (x >= high - room)
