"""What is doubtful about a fit: starts that disagree, walls, free directions."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from scaling import solving
from scaling.fit_results import FitResult
from scaling.solving import Ends, Problem

_FREE = 1e-8
"""A direction whose scaled curvature is below it is free."""
_COLLINEAR = 0.03
_SAME = 1e-4
"""Optima whose predictions differ by less, in logarithms, are one."""


_FEW = 3
"""Fewer points than this many for each coefficient are few."""
_ILL = 1e6
_WALL_SHARE = 0.05
_FAR, _FAR_SHARE = 8.0, 0.03


class Starts(NamedTuple):
    """How the starts ended: the best one, a status each, how many different optima."""

    best: int
    statuses: list[str]
    distinct_minima: int


class Shape(NamedTuple):
    """The curvature at the optimum: see `FitResult`."""

    condition_number: float
    flat_directions: list[dict[str, float]]


def compare_starts(problem: Problem, ends: Ends) -> Starts:
    """Says how every start ended; counts optima that differ in what they predict."""
    low, high = problem.box
    walls = _at_walls(ends.coordinates, low, high).any(1)
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
    found: list[np.ndarray] = []
    if len(order):
        law, logs = problem.law, problem.seen.logs
        for value in solving.values(law, ends.coordinates[order], logs):
            if all(np.abs(value - other).max() > _SAME for other in found):
                found.append(value)
    return Starts(best, statuses, max(1, len(found)))


def bounds_hit(problem: Problem, coordinates: Float[np.ndarray, " k"]) -> list[str]:
    """Names the coefficients at a wall of the box."""
    walls = _at_walls(coordinates, *problem.box)
    return [n for n, w in zip(problem.law.coefficients, walls, strict=True) if w]


def shape(problem: Problem, matrix: Float[np.ndarray, "k k"]) -> Shape:
    """Finds directions in which the objective does not rise."""
    size = np.sqrt(np.maximum(np.diagonal(matrix), 1e-300))
    bends, directions = np.linalg.eigh(matrix / np.outer(size, size))
    ratio = bends / max(bends[-1], 1e-300)
    names = problem.law.coefficients
    flat = []
    for bend, direction in zip(ratio, directions.T, strict=True):
        if bend < _FREE:
            direction = direction / size
            direction = direction / np.linalg.norm(direction)
            flat.append(dict(zip(names, map(float, direction), strict=True)))
    return Shape(1 / max(float(ratio[0]), 1e-17), flat)


def collinear(problem: Problem) -> tuple[str, str] | None:
    """Names two inputs of which one follows from the other in these runs."""
    logs, names = problem.seen.logs, problem.law.inputs
    for i in range(len(logs)):
        for j in range(i):
            a, b = (x - x.mean() for x in (logs[i], logs[j]))
            spread = np.sqrt(np.mean(a * a) * np.mean(b * b))
            share = abs(float(np.mean(a * b))) / max(spread, 1e-300)
            if 1 - min(share, 1.0) ** 2 < _COLLINEAR**2:
                return names[j], names[i]
    return None


def warnings(problem: Problem, result: FitResult) -> list[str]:
    """Puts the doubts about a fit into words; none where it is sound."""
    n, k = result.num_points, len(result.coefficients)
    said = []
    if n < _FEW * k:
        said.append(f"{n} points are few for {k} coefficients: intervals are rough")
    if result.status in ("max_iter", "abnormal"):
        said.append(f"the best start ended as {result.status}: this may be no optimum")
    if pair := collinear(problem):
        said.append(
            f"{pair[1]} follows from {pair[0]} in these runs, so their terms cannot be "
            "told apart: vary them separately"
        )
    for name in result.bounds_hit:
        said.append(
            f"{name}={result.coefficients[name]:.4g} is where the search ends: the "
            "data does not identify it"
        )
    for name, share in _shares_at_walls(problem, result).items():
        if name not in result.bounds_hit and share > _WALL_SHARE:
            said.append(
                f"{name} is where the search ends in {share:.0%} of the resamples: the "
                "data hardly identifies it"
            )
    if result.condition_number > _ILL and not result.bounds_hit:
        said.append(
            f"condition number {result.condition_number:.0e}: "
            "combinations of coefficients are free"
        )
    num_far = _num_far(result.residuals)
    if num_far >= max(2, _FAR_SHARE * n):
        said.append(
            f"{num_far} of {n} points are far off the law: outliers, or another law"
        )
    return said


def _shares_at_walls(problem: Problem, result: FitResult) -> dict[str, float]:
    """How often each coefficient was at a wall in the resamples."""
    if result.samples is None:
        return {}
    shares = _at_walls(result.samples, *problem.box).mean(0)
    return dict(zip(problem.law.coefficients, map(float, shares), strict=True))


def _num_far(residuals: np.ndarray) -> int:
    """Counts residuals beyond eight times the spread of the middle half."""
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    return int(np.sum(np.abs(residuals) > _FAR * max(spread, 1e-9)))


def _at_walls(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    room = 1e-9 * (high - low)
    return (x <= low + room) | (x >= high - room)
