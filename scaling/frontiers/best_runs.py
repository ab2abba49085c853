"""Compute to equal loss, from the frontier of the trained runs without extrapolation.

The frontier is the best loss at or below each compute among finished runs. A curve
through its points makes two sets of runs comparable at one loss. The optimum of a law
of size and tokens is not used here: with few and short runs it is outside the trained
range.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation
from scaling.laws import Amount

NUM_CURVE_POINTS = 40
"""Points of every curve."""
MIN_POINTS = 4
"""Least number of frontier points: one more than the curve's coefficients."""
MAX_MISS = 1.25
"""Largest residual of a curve, as a factor of compute, for which a ratio is given."""
_EXPONENTS = np.geomspace(0.02, 4, 120)


class FrontierCurve(NamedTuple):
    """Lowest loss against compute, over the frontier's range of compute.

    Attributes:
      flops: compute, rising.
      loss: loss at each compute.
      residual: root mean square of the frontier about the curve, nats.
    """

    flops: Float[np.ndarray, "... points"]
    loss: Float[np.ndarray, "... points"]
    residual: Float[np.ndarray, "..."]


class ComputeRatio(NamedTuple):
    """Compute of the second runs over that of the first; NaN if unknown.

    Attributes:
      loss: losses that both have, in descending order.
      ratio: ratio at each loss.
      low: lower end of the 90 % interval.
      high: upper end of the 90 % interval.
      reason: reason why there is no ratio; "" if there is one.
    """

    loss: Float[np.ndarray, "... points"]
    ratio: Float[np.ndarray, "... points"]
    low: Float[np.ndarray, "... points"]
    high: Float[np.ndarray, "... points"]
    reason: np.ndarray


class FrontierFit(NamedTuple):
    """`loss = floor + factor * (flops / unit) ** -exponent`, from first to last.

    Attributes:
      floor: floor in nats, at least 0.
      factor: factor in nats.
      exponent: exponent, above 0.
      unit: unit of compute in FLOPs.
      first: FLOPs of the frontier's cheapest run.
      last: FLOPs of the frontier's most expensive run.
      residual: root mean square in nats, corrected for degrees of freedom.
      miss: the residual as a factor of compute, by the mean slope from first to last.
    """

    floor: float
    factor: float
    exponent: float
    unit: float
    first: float
    last: float
    residual: float
    miss: float

    def loss(self, flops: Amount) -> Any:
        """Returns the loss at a compute, a number or an array."""
        return self.floor + self.factor * (flops / self.unit) ** -self.exponent

    def flops(self, loss: Amount) -> Any:
        """Returns the compute at a loss; infinite at the floor and below."""
        above = np.maximum(loss - self.floor, 0.0)
        with np.errstate(divide="ignore"):
            return self.unit * (above / self.factor) ** (-1 / self.exponent)


def find_best_runs(
    flops: Float[np.ndarray, " runs"], loss: Float[np.ndarray, " runs"]
) -> Int[np.ndarray, " best"]:
    """Returns indices, by rising compute, of runs better than all cheaper runs."""
    order = np.lexsort((loss, flops))
    best = np.minimum.accumulate(loss[order])
    return order[np.diff(best, prepend=np.inf) < 0]


def fit_best_runs(
    flops: Float[np.ndarray, " runs"], loss: Float[np.ndarray, " runs"]
) -> FrontierFit | None:
    """Fits the frontier of runs by least squares.

    Args:
      flops: compute of the runs.
      loss: loss of each run; runs whose loss is not finite are ignored.

    Returns:
      A falling curve with a floor of at least 0; None if the frontier has fewer than
      `MIN_POINTS` points.
    """
    finite = np.isfinite(loss)
    flops = flops[finite]
    loss = loss[finite]
    best = find_best_runs(flops, loss)
    flops = flops[best]
    loss = loss[best]
    if len(loss) < MIN_POINTS:
        return None
    unit = float(np.exp(np.log(flops).mean()))
    power = (flops / unit) ** -_EXPONENTS[:, None]
    apart = power - power.mean(1, keepdims=True)
    factor = (apart * loss).sum(1) / (apart**2).sum(1)
    floor = loss.mean() - factor * power.mean(1)
    # If the best line has a floor below zero, the best slope through the origin.
    low = floor < 0
    factor = np.where(low, (power * loss).sum(1) / (power**2).sum(1), factor)
    floor = np.where(low, 0.0, floor)
    squares = ((floor[:, None] + factor[:, None] * power - loss) ** 2).sum(1)
    at = int(np.argmin(squares))
    residual = float(np.sqrt(squares[at] / (len(loss) - 3)))
    slope = (loss[0] - loss[-1]) / np.log(flops[-1] / flops[0])
    return FrontierFit(
        floor=float(floor[at]),
        factor=float(factor[at]),
        exponent=float(_EXPONENTS[at]),
        unit=unit,
        first=float(flops[0]),
        last=float(flops[-1]),
        residual=residual,
        miss=float(np.exp(residual / slope)),
    )


@validation.checks_numbers(count=0, seed=validation.SEEDS)
def resample_fits(
    flops: Float[np.ndarray, " runs"],
    loss: Float[np.ndarray, " runs"],
    trunk: Int[np.ndarray, "runs names"],
    *,
    count: int,
    seed: int,
) -> list[FrontierFit | None]:
    """Fits resamples of trunks drawn with replacement, with all branches of each.

    Args:
      flops: compute of the runs.
      loss: loss of each run.
      trunk: key of each run's trunk, as a size and a seed; runs of one trunk are drawn
        together.
      count: number of resamples.
      seed: seed of the draws.
    """
    trunks, label = np.unique(trunk, axis=0, return_inverse=True)
    rng = np.random.default_rng(seed)
    fit_by_draw = {}
    fits = []
    for _ in range(count if len(trunks) else 0):
        draw = frozenset(rng.choice(len(trunks), len(trunks)).tolist())
        # The frontier depends on the set of drawn runs, not on their counts.
        if draw not in fit_by_draw:
            mask = np.isin(label, [*draw])
            fit_by_draw[draw] = fit_best_runs(flops[mask], loss[mask])
        fits.append(fit_by_draw[draw])
    return fits


def evaluate_fit(fit: FrontierFit | None) -> FrontierCurve:
    """Evaluates a fit over its range of compute; NaN without a fit."""
    if fit is None:
        return FrontierCurve(*np.full((2, NUM_CURVE_POINTS), np.nan), np.array(np.nan))
    flops = np.geomspace(fit.first, fit.last, NUM_CURVE_POINTS)
    return FrontierCurve(flops, fit.loss(flops), np.array(fit.residual))


def compare_best_runs(
    first: FrontierFit | None,
    second: FrontierFit | None,
    resamples: tuple[Sequence[FrontierFit | None], Sequence[FrontierFit | None]] = (
        (),
        (),
    ),
    *,
    names: tuple[str, str] = ("the first", "the second"),
) -> ComputeRatio:
    """Compares two fits at the losses that both have.

    Args:
      first: fit whose compute is the denominator.
      second: fit whose compute is the numerator.
      resamples: fits of both to resampled runs. A resample without a curve, or whose
        curve does not reach the loss, counts as beyond either end of the interval, so
        an interval is given only if 90 % are certainly inside.
      names: names of both for a reason.
    """
    reason = _refusal((first, second), names)
    nothing = np.full(NUM_CURVE_POINTS, np.nan)
    if reason or first is None or second is None:
        return ComputeRatio(nothing, nothing, nothing, nothing, np.array(reason))
    losses = np.linspace(*_overlap(first, second), NUM_CURVE_POINTS)
    with np.errstate(invalid="ignore"):
        ratios = [
            nothing if a is None or b is None else b.flops(losses) / a.flops(losses)
            for a, b in zip(*resamples, strict=True)
        ]
    draws = np.array(ratios or [nothing])
    is_valid = np.isfinite(draws) & (draws > 0)
    low = np.quantile(np.where(is_valid, draws, 0.0), 0.05, 0, method="lower")
    high = np.quantile(np.where(is_valid, draws, np.inf), 0.95, 0, method="higher")
    bounded = (low > 0) & np.isfinite(high)
    return ComputeRatio(
        losses,
        second.flops(losses) / first.flops(losses),
        np.where(bounded, low, np.nan),
        np.where(bounded, high, np.nan),
        np.array(""),
    )


def _overlap(first: FrontierFit, second: FrontierFit) -> tuple[float, float]:
    """Returns the highest and the lowest loss within the compute of both fits."""
    high = min(float(x.loss(x.first)) for x in (first, second))
    return high, max(float(x.loss(x.last)) for x in (first, second))


def _refusal(
    fits: tuple[FrontierFit | None, FrontierFit | None], names: tuple[str, str]
) -> str:
    """Returns why two fits have no ratio, or "" if they have one."""
    valid_fits = []
    for name, fit in zip(names, fits, strict=True):
        if fit is None:
            return f"the frontier of {name} has fewer than {MIN_POINTS} runs"
        if fit.miss > MAX_MISS:
            return (
                f"the curve of {name} misses its runs by {fit.residual:.3f} nats, a "
                f"factor of {fit.miss:.2f} in compute"
            )
        valid_fits.append(fit)
    high, low = _overlap(*valid_fits)
    if high - low <= sum(fit.residual for fit in valid_fits):
        return "the losses of the two do not overlap"
    return ""
