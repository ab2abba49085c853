"""Comparison of two fitted laws: ratio of compute to reach equal loss."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from scaling import laws
from scaling.fits.result import FitResult
from scaling.laws import compute_optimum

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
