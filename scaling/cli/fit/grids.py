"""Data of a fit's figure, computed before drawing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from scaling.cli.fit.groups import FitGroup
from scaling.cli.fit.result import Contour, PlotCurve
from scaling.fits import FitResult, choose_pair, predict, profile_objective
from scaling.frontiers import PARABOLA, FrontierSet, average_by_size, fit_parabola
from scaling.laws import Optimum, compute_optimum
from scaling.logs import FLOPS_PER_PARAM_AND_TOKEN, SIZE_COLUMNS

MAX_SIZES = 6
"""Largest number of distinguishable curves in one panel."""
NUM_POINTS = 80
"""Points of a curve."""
NUM_CELLS = (41, 61)
"""Cells of a contour along each axis: for many runs, and for fewer than `FEW_RUNS`,
whose valleys are narrow compared with the spread of their resamples."""
FEW_RUNS = 60
MAX_GRID_ROWS = 1024
"""Largest number of rows for a contour of the objective: time and memory grow with the
rows, and for more rows the objective is nearly flat over the range of the resamples."""

Columns = Mapping[str, np.ndarray]


def loss_curves(
    parts: Sequence[FitGroup], columns: Columns
) -> tuple[np.ndarray, PlotCurve]:
    """Returns the first law's loss against compute, for some of the sizes of the runs.

    Returns:
      The sizes, and curves with a row per size, NaN far from all runs. Both are empty
      for a law with inputs other than N, D and C, for a log without one of them, and
      for several groups, whose curves would overlap.
    """
    fit = parts[0].fits[0]
    if len(parts) > 1 or not {*SIZE_COLUMNS} <= columns.keys():
        return np.empty(0), PlotCurve(np.empty((0, 0)), np.empty((0, 0)))
    n, d, c = (columns[name] for name in SIZE_COLUMNS)
    sizes = np.unique(n)
    if sizes.size > MAX_SIZES:
        places = np.linspace(0, sizes.size - 1, MAX_SIZES).round().astype(int)
        sizes = sizes[places]
    flops = np.geomspace(c.min() / 2, c.max() * 2, NUM_POINTS)
    if not {*fit.inputs} <= {*SIZE_COLUMNS}:
        sizes = sizes[:0]
    x = np.tile(flops, (sizes.size, 1))
    y = np.full(x.shape, np.nan)
    for i, size in enumerate(sizes):
        tokens = flops / (_per_param_and_token(columns) * size)
        ratio = tokens / size
        near = (tokens > d.min() / 2) & (tokens < d.max() * 2)
        near &= (ratio > (d / n).min() / 2) & (ratio < (d / n).max() * 2)
        if near.any():
            at = {
                "num_params": np.full(near.sum(), size),
                "num_tokens": tokens[near],
                "flops": flops[near],
            }
            y[i, near] = predict(fit, at)[0]
    return sizes, PlotCurve(x, y)


def optimum_curve(parts: Sequence[FitGroup], columns: Columns) -> PlotCurve:
    """Returns the loss at the first law's compute optimum, to a decade beyond the runs.

    For a log with only one of N, D and C it is the law against that input. Curves of
    groups follow one another, separated by NaN.
    """
    lines = [_frontier(part.fits[0], part.rows, columns) for part in parts]
    gap = np.array([np.nan])
    x, y = (
        [piece for line in axis for piece in (line, gap)]
        for axis in zip(*lines, strict=True)
    )
    return PlotCurve(np.concatenate(x[:-1]), np.concatenate(y[:-1]))


def _frontier(fit: FitResult, rows: np.ndarray, columns: Columns) -> PlotCurve:
    law = fit.find_law()
    selected = {name: x[rows] for name, x in columns.items()}
    empty = PlotCurve(np.empty(0), np.empty(0))
    if not {*SIZE_COLUMNS} <= columns.keys():
        size_names = [name for name in SIZE_COLUMNS if name in columns]
        if [*law.inputs] != size_names:
            return empty
        sizes = selected[size_names[0]]
        x = np.geomspace(sizes.min() / 2, sizes.max() * 10, NUM_POINTS)
        return PlotCurve(x, predict(fit, {size_names[0]: x})[0])
    if law.two_powers is None:
        return empty
    flops = selected["flops"]
    x = np.geomspace(flops.min() / 2, flops.max() * 10, NUM_POINTS)
    return PlotCurve(x, np.asarray(optimum_at(fit, selected, x).loss, float))


def optimum_at(
    fit: FitResult, columns: Columns, flops: Float[np.ndarray, " budgets"]
) -> Optimum:
    """Returns the optimum of the law at budgets that are counted as in the runs.

    C differs from 6 N D of all parameters: attention and the head count, norms do not.
    """
    by_6nd = flops * FLOPS_PER_PARAM_AND_TOKEN / _per_param_and_token(columns)
    return compute_optimum(fit.find_law(), fit.coefficients, by_6nd)


def _per_param_and_token(columns: Columns) -> float:
    """Returns C / (N D) of the runs: 6, unless their FLOPs were counted differently."""
    n, d, c = (columns[name] for name in SIZE_COLUMNS)
    return float(np.median(c / (n * d)))


class GridGroups(NamedTuple):
    """IsoFLOP groups to draw.

    Attributes:
      group: group of each run, -1 for none.
      curves: parabola of each group, a row per group.
      minima: minimum of each parabola; NaN for none.
    """

    group: np.ndarray
    curves: PlotCurve
    minima: PlotCurve


def find_parabolas(parts: Sequence[FitGroup], is_fitted: np.ndarray) -> GridGroups:
    """Returns the parabolas through the isoFLOP groups of all parts of a log."""
    group = np.full(is_fitted.size, -1)
    num_groups = 0
    grid_groups = []
    for part in parts:
        part_groups = _parabolas(part.frontier_set, int((part.rows & is_fitted).sum()))
        mask = part_groups.group >= 0
        part_groups.group[mask] += num_groups
        group[part.rows & is_fitted] = part_groups.group
        num_groups += len(part.frontier_set.groups.groups)
        grid_groups.append(part_groups)
    return GridGroups(
        group,
        PlotCurve(
            *map(np.concatenate, zip(*(x.curves for x in grid_groups), strict=True))
        ),
        PlotCurve(
            *map(np.concatenate, zip(*(x.minima for x in grid_groups), strict=True))
        ),
    )


def _parabolas(frontier_set: FrontierSet, num_runs: int) -> GridGroups:
    groups = frontier_set.groups.groups
    group = np.full(num_runs, -1)
    x = np.full((len(groups), NUM_POINTS), np.nan)
    y = x.copy()
    for i, profile in enumerate(groups):
        group[frontier_set.groups.rows[profile.places]] = i
        loss, weight = average_by_size(profile, np.ones((1, profile.places.size)))
        vertex = fit_parabola(np.log10(profile.sizes), loss, weight)
        x[i] = np.geomspace(profile.sizes[0], profile.sizes[-1], NUM_POINTS)
        y[i] = vertex.height + vertex.curvature * (np.log10(x[i]) - vertex.place) ** 2
    plain = [
        frontier for frontier in frontier_set.frontiers if frontier.method == PARABOLA
    ]
    if not plain:
        return GridGroups(group, PlotCurve(x, y), PlotCurve(np.empty(0), np.empty(0)))
    best = plain[0].minima
    return GridGroups(
        group, PlotCurve(x, y), PlotCurve(best.num_params[0], best.loss[0])
    )


def objective_contour(fit: FitResult, columns: Columns) -> Contour:
    """Returns the objective over the plane of two coefficients; empty for many rows."""
    names = choose_pair(fit)
    if names is None:
        none = np.empty(0)
        return Contour("", "", none, none, np.empty((0, 0)), none, none)
    places = [[*fit.coefficients].index(name) for name in names]
    samples = fit.sampled()[:, places]
    axes = []
    for i, place in enumerate(places):  # about twice as wide as the samples
        value = [*fit.coefficients.values()][place]
        half = 0.0
        draws = samples[np.isfinite(samples[:, i]), i]
        if draws.size:
            low, high = np.quantile(draws, (0.02, 0.98))
            half = 1.5 * max(value - low, high - value)
        elif np.isfinite(fit.covariance[place, place]):
            half = 4 * float(np.sqrt(max(fit.covariance[place, place], 0.0)))
        half = float(np.clip(half, 0.05 * abs(value) + 1e-6, 0.9 * abs(value) + 2e-6))
        cells = NUM_CELLS[fit.num_points < FEW_RUNS]
        axes.append(np.linspace(value - half, value + half, cells))
    x, y = axes
    if fit.num_points > MAX_GRID_ROWS:
        none = np.empty((0, 0))
        return Contour(*names, x, y, none, samples[:, 0], samples[:, 1])
    objective = profile_objective(fit, columns, names, x, y)
    # For an exact law, the minimum of the objective is a rounding error.
    over_least = np.maximum(objective / max(fit.objective, 1e-12), 1.0)
    return Contour(*names, x, y, over_least, samples[:, 0], samples[:, 1])
