"""Comparison of two fitted laws: ratio of compute to reach equal loss.

The ratio depends strongly on the floors of both laws, which runs hardly determine.
`join_groups` makes one law of several groups of runs, which share the floor and differ
in all other coefficients; `split_groups` returns the law of each group.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation
from scaling import laws
from scaling.fits.result import FitResult
from scaling.laws import Law, compute_optimum

GROUP = "group"
"""Column of the groups of a joined law: e to the power of the index."""
_GRID = 2001
_COMPUTE_MARGIN = 10.0
"""Factor of compute beyond the runs to which resampled curves are extrapolated."""


class Comparison(NamedTuple):
    """Compute of the second fit over that of the first, for equal losses.

    Attributes:
      loss: losses that both fits reach, in descending order.
      ratio: compute of the second fit over that of the first.
      low: lower end of the interval of the ratio; NaN without resamples of both.
      high: upper end of the interval.
    """

    loss: Float[np.ndarray, " losses"]
    ratio: Float[np.ndarray, " losses"]
    low: Float[np.ndarray, " losses"]
    high: Float[np.ndarray, " losses"]


@validation.checks_numbers(num_losses=2, level="(0, 1)")
def compare(
    first: FitResult, second: FitResult, *, num_losses: int = 50, level: float = 0.9
) -> Comparison:
    """Computes the ratio of compute to reach equal loss, as a function of loss.

    For a law of parameters and tokens, compute is that of the compute optimum (C = 6 N
    D); for a law of a single input, it is the input. The curves are compared within the
    range of compute of each fit, at losses that both have.

    Args:
      first: a fit.
      second: another fit.
      num_losses: number of losses of the result, at least 2.
      level: probability of the intervals, in (0, 1).

    Raises:
      ValueError: a law has neither an optimum nor a single input, the inputs differ, or
        the fits have no loss in common.
    """
    names = []
    for law in (first.find_law(), second.find_law()):
        if law.two_powers is None and len(law.inputs) > 1:
            raise ValueError(
                f"{law.name} has neither a compute optimum nor a single input"
            )
        names.append("flops" if law.two_powers else law.inputs[0])
    if names[0] != names[1]:
        raise ValueError(f"{names[0]} of one fit cannot be compared with {names[1]}")
    fits = [(result, result.ranges[names[0]]) for result in (first, second)]
    curves = [_losses(r, np.geomspace(*span, _GRID))[0] for r, span in fits]
    low = max(float(curve.min()) for curve in curves)
    high = min(float(curve.max()) for curve in curves)
    if not low < high:
        raise ValueError(
            "no loss was reached by both: one fit covers "
            + " and the other ".join(f"{x.min():.4g} to {x.max():.4g}" for x in curves)
        )
    loss = np.geomspace(high, low, num_losses)
    needed = []
    for result, span in fits:
        # Log compute at which each curve reaches each loss.
        compute = np.geomspace(
            span[0] / _COMPUTE_MARGIN, span[1] * _COMPUTE_MARGIN, _GRID
        )
        rows = []
        for curve in _losses(result, compute):
            falling = np.log(np.minimum.accumulate(curve)[::-1])
            x = np.log(loss)
            log_compute = np.log(compute)[::-1]
            rows.append(np.interp(x, falling, log_compute, left=np.nan, right=np.nan))
        needed.append(np.array(rows))
    ratio = np.exp(needed[1][0] - needed[0][0])
    sampled = [curves[1:] for curves in needed]
    count = min(map(len, sampled))
    if not count:
        nothing = np.full(num_losses, np.nan)
        return Comparison(loss, ratio, nothing, nothing)
    several = sampled[1][:count] - sampled[0][:count]
    # A resampled curve that never reaches the loss needs infinite compute.
    several = np.where(np.isnan(several), np.inf, several)
    shares = [(1 - level) / 2, (1 + level) / 2]
    ends = np.quantile(several, shares, axis=0, method="nearest")
    return Comparison(loss, ratio, np.exp(ends[0]), np.exp(ends[1]))


@validation.checks_numbers(num_groups=2)
def join_groups(law: Law, num_groups: int) -> Law:
    """Returns one law for several groups of runs, whose only common part is the floor.

    Args:
      law: a law with a floor.
      num_groups: number of groups, at least 2.

    Returns:
      The law, with the further input `GROUP`. Its coefficients are those of each group,
      with the index as a suffix, and the floor.

    Raises:
      ValueError: the law has no floor.
    """
    if law.floor is None:
        raise ValueError(f"{law.name} has no floor that groups could share")
    free = [x for x in law.coordinates if x.name != law.floor]
    coordinates = tuple(
        x._replace(name=f"{x.name}_{i}", starts=x.starts[:1])
        for i in range(num_groups)
        for x in free
    )
    floor = next(x for x in law.coordinates if x.name == law.floor)
    places = _group_places(law, num_groups)

    def log_loss(x: Any, logs: Any) -> Any:
        group = jnp.round(logs[-1])
        total = jnp.zeros_like(group)
        for i, place in enumerate(places):
            value = law.log_loss(x[place], logs[:-1])
            total = jnp.where(group == i, value, total)
        return total

    def shift(x: Any, centre: Any) -> Any:
        moved = [law.shift(x[place], centre[:-1]) for place in places]
        parts = [
            row[np.array([c.name != law.floor for c in law.coordinates])]
            for row in moved
        ]
        return jnp.concatenate([*parts, x[-1:]])

    return Law(
        name=f"{law.name}, {num_groups} groups with one {law.floor}",
        formula=f"{law.formula} in each group, with one {law.floor}",
        inputs=(*law.inputs, GROUP),
        coordinates=(*coordinates, floor._replace(starts=floor.starts[:1])),
        source=law.source,
        log_loss=log_loss,
        shift=shift,
        target=law.target,
        floor=law.floor,
        units=law.units or tuple((i,) for i in range(len(law.inputs))),
    )


def _group_places(law: Law, num_groups: int) -> Int[np.ndarray, "groups k"]:
    """Returns the places of each group's coefficients in those of the joined law."""
    k = len(law.coordinates)
    places = np.full((num_groups, k), num_groups * (k - 1))
    is_free = np.array([x.name != law.floor for x in law.coordinates])
    places[:, is_free] = np.arange(num_groups * (k - 1)).reshape(num_groups, -1)
    return places


def split_groups(
    joined: FitResult, law: Law, groups: Sequence[Mapping[str, Any]]
) -> list[FitResult]:
    """Returns the fit of each group of a joined law, with its resamples.

    Args:
      joined: fit of `join_groups(law, len(groups))`.
      law: law of a group, in `laws.LAWS`.
      groups: columns of each group's runs.
    """
    values = np.array([*joined.coefficients.values()])
    names = [*joined.coefficients]
    results = []
    start = 0
    for place, data in zip(_group_places(law, len(groups)), groups, strict=True):
        columns = {x: np.asarray(data[x], float) for x in (*law.inputs, law.target)}
        if {"num_params", "num_tokens"} <= columns.keys():
            columns["flops"] = 6 * columns["num_params"] * columns["num_tokens"]
        end = start + len(columns[law.target])
        natural = map(float, values[place])
        result = joined._replace(
            law=law.name,
            inputs=law.inputs,
            coefficients=dict(zip(law.coefficients, natural, strict=True)),
            intervals={
                x: joined.intervals[names[i]]
                for x, i in zip(law.coefficients, place, strict=True)
            },
            covariance=joined.covariance[np.ix_(place, place)],
            samples=None if joined.samples is None else joined.samples[:, place],
            coordinates=joined.coordinates[place],
            centre=joined.centre[:-1],
            num_points=end - start,
            residuals=joined.residuals[start:end],
            noise=joined.noise[start:end],
            ranges={x: (float(y.min()), float(y.max())) for x, y in columns.items()},
        )
        results.append(result)
        start = end
    return results


def _losses(
    result: FitResult, compute: Float[np.ndarray, " grid"]
) -> Float[np.ndarray, "curves grid"]:
    """Returns the fit's curve of loss against compute, then those of its resamples."""
    law = result.find_law()
    if law.two_powers is None:
        points = result.coordinates[None]
        if result.samples is not None:
            points = np.concatenate([points, result.samples])
        logs = np.log(compute)[None] - result.centre[:, None]
        return np.exp(laws.values(law, points, logs))
    fitted = np.array([[*result.coefficients.values()]])
    rows = np.concatenate([fitted, result.sampled()])
    columns = dict(zip(law.coefficients, rows.T[:, :, None], strict=True))
    return np.asarray(compute_optimum(law, columns, compute[None]).loss)
