"""Compute to equal loss, read off the runs that were made and nothing beyond them.

The frontier is the best loss at or below each compute among finished runs. A curve
through its points makes two sets of runs comparable at one loss. A law of size and
tokens is not asked for its optimum here: of few and short runs that lies where nobody
trained.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

NUM_POINTS = 40
"""Of every curve."""
MIN_POINTS = 4
"""Of a frontier: one more than its curve has coefficients."""
MAX_MISS = 1.25
"""By which factor of compute a curve may miss its runs; beyond it no ratio is given."""
_EXPONENTS = np.geomspace(0.02, 4, 120)


class FrontierCurve(NamedTuple):
    """The least loss by compute, over the compute of the frontier.

    Attributes:
      flops: rising.
      loss: at each.
      residual: root mean square of the frontier about the curve, nats.
    """

    flops: Float[np.ndarray, "... points"]
    loss: Float[np.ndarray, "... points"]
    residual: Float[np.ndarray, "..."]


class ComputeRatio(NamedTuple):
    """Compute of the second runs over that of the first; not a number where unknown.

    Attributes:
      loss: where both have it, falling.
      ratio: there.
      low: where its 90 % interval begins.
      high: where it ends.
      reason: why there is no ratio, in words; empty where one is.
    """

    loss: Float[np.ndarray, "... points"]
    ratio: Float[np.ndarray, "... points"]
    low: Float[np.ndarray, "... points"]
    high: Float[np.ndarray, "... points"]
    reason: np.ndarray


class FrontierFit(NamedTuple):
    """`loss = floor + factor * (flops / unit) ** -exponent`, from first to last.

    Attributes:
      floor: nats, at least 0.
      factor: nats.
      exponent: above 0.
      unit: FLOPs.
      first: FLOPs of the frontier's cheapest run.
      last: of its dearest.
      residual: root mean square, nats, for the degrees of freedom that are left.
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

    def loss(self, flops: Any) -> Any:
        """Gives the loss at a compute, a number or an array."""
        return self.floor + self.factor * (flops / self.unit) ** -self.exponent

    def flops(self, loss: Any) -> Any:
        """Gives the compute at a loss, alike; infinite at the floor and below."""
        above = np.maximum(loss - self.floor, 0.0)
        with np.errstate(divide="ignore"):
            return self.unit * (above / self.factor) ** (-1 / self.exponent)


def find_best_runs(
    flops: Float[np.ndarray, " runs"], loss: Float[np.ndarray, " runs"]
) -> Int[np.ndarray, " best"]:
    """Indices, by rising compute, of runs better than all of no more compute."""
    order = np.lexsort((loss, flops))
    best = np.minimum.accumulate(loss[order])
    return order[np.diff(best, prepend=np.inf) < 0]


def fit_best_runs(
    flops: Float[np.ndarray, " runs"], loss: Float[np.ndarray, " runs"]
) -> FrontierFit | None:
    """Fits the frontier of runs by least squares.

    Args:
      flops: of the runs.
      loss: of each; those that are not finite are left out.

    Returns:
      A falling curve whose floor is at least 0; None if the frontier has fewer than
      `MIN_POINTS` points.
    """
    finite = np.isfinite(loss)
    flops, loss = flops[finite], loss[finite]
    best = find_best_runs(flops, loss)
    flops, loss = flops[best], loss[best]
    if len(loss) < MIN_POINTS:
        return None
    unit = float(np.exp(np.log(flops).mean()))
    power = (flops / unit) ** -_EXPONENTS[:, None]
    apart = power - power.mean(1, keepdims=True)
    factor = (apart * loss).sum(1) / (apart**2).sum(1)
    floor = loss.mean() - factor * power.mean(1)
    # The best slope through the origin where the best line has a floor below it.
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


def resample_fits(
    flops: Float[np.ndarray, " runs"],
    loss: Float[np.ndarray, " runs"],
    trunk: Int[np.ndarray, "runs names"],
    *,
    count: int,
    seed: int,
) -> list[FrontierFit | None]:
    """Fits again and again trunks drawn with replacement, all branches of each.

    Args:
      flops: of the runs.
      loss: of each.
      trunk: what names it, as a size and a seed; runs of one are drawn together.
      count: of the draws.
      seed: of them.
    """
    trunks, label = np.unique(trunk, axis=0, return_inverse=True)
    rng, known, found = np.random.default_rng(seed), {}, []
    for _ in range(count if len(trunks) else 0):
        drawn = frozenset(rng.choice(len(trunks), len(trunks)).tolist())
        # Of a frontier it matters which runs are there, not how often.
        if drawn not in known:
            here = np.isin(label, [*drawn])
            known[drawn] = fit_best_runs(flops[here], loss[here])
        found.append(known[drawn])
    return found


def evaluate_fit(found: FrontierFit | None) -> FrontierCurve:
    """Follows a fit where its runs are; not a number where there is none."""
    if found is None:
        return FrontierCurve(*np.full((2, NUM_POINTS), np.nan), np.array(np.nan))
    flops = np.geomspace(found.first, found.last, NUM_POINTS)
    return FrontierCurve(flops, found.loss(flops), np.array(found.residual))


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
    """Compares two fits where the runs of both have the loss.

    Args:
      first: whose compute divides.
      second: whose compute is divided.
      resamples: fits of both to resampled runs. One that has no curve or does not
        come down to the loss counts as beyond either end, so that an interval is
        given only where 90 % are surely inside.
      names: what to call them in a reason.
    """
    reason = _refusal((first, second), names)
    nothing = np.full(NUM_POINTS, np.nan)
    if reason or first is None or second is None:
        return ComputeRatio(nothing, nothing, nothing, nothing, np.array(reason))
    losses = np.linspace(*_overlap(first, second), NUM_POINTS)
    with np.errstate(invalid="ignore"):
        ratios = [
            nothing if a is None or b is None else b.flops(losses) / a.flops(losses)
            for a, b in zip(*resamples, strict=True)
        ]
    drawn = np.array(ratios or [nothing])
    known = np.isfinite(drawn) & (drawn > 0)
    low = np.quantile(np.where(known, drawn, 0.0), 0.05, 0, method="lower")
    high = np.quantile(np.where(known, drawn, np.inf), 0.95, 0, method="higher")
    bounded = (low > 0) & np.isfinite(high)
    return ComputeRatio(
        losses,
        second.flops(losses) / first.flops(losses),
        np.where(bounded, low, np.nan),
        np.where(bounded, high, np.nan),
        np.array(""),
    )


def _overlap(first: FrontierFit, second: FrontierFit) -> tuple[float, float]:
    """Highest and lowest loss that the curves of both have within their compute."""
    high = min(float(x.loss(x.first)) for x in (first, second))
    return high, max(float(x.loss(x.last)) for x in (first, second))


def _refusal(
    fits: tuple[FrontierFit | None, FrontierFit | None], names: tuple[str, str]
) -> str:
    """Says why two have no ratio; empty if they have."""
    found = []
    for name, each in zip(names, fits, strict=True):
        if each is None:
            return f"the frontier of {name} has fewer than {MIN_POINTS} runs"
        if each.miss > MAX_MISS:
            return (
                f"the curve of {name} misses its runs by {each.residual:.3f} nats, a "
                f"factor of {each.miss:.2f} in compute"
            )
        found.append(each)
    high, low = _overlap(*found)
    if high - low <= sum(each.residual for each in found):
        return "the losses of the two do not overlap"
    return ""
