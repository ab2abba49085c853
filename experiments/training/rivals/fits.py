"""Compute to equal loss, read off the runs that were made and nothing beyond them.

The frontier of a side is the best loss at or below each compute among its finished
runs. A curve through its points makes two sides comparable at one loss. A law of size
and tokens is not asked for its optimum here: of so few and short runs that lies where
nobody trained.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NUM_POINTS = 40
"""Of every curve."""
SIZES = ("exact", "6ND")
"""How compute is counted."""
MIN_POINTS = 4
"""Of a frontier: one more than its curve has coefficients."""
MAX_MISS = 1.25
"""By which factor of compute a curve may miss its runs; beyond it no ratio is given."""
_EXPONENTS = np.geomspace(0.02, 4, 120)


class Curve(NamedTuple):
    """The least loss of a side by compute, over the compute of its frontier."""

    flops: np.ndarray
    loss: np.ndarray
    residual: np.ndarray
    """Root mean square of the frontier about the curve, nats; a scalar."""


class Ratio(NamedTuple):
    """Compute of a side over that of the reference, by loss; 90 % intervals.

    Not a number is what is not identified; `reason` says in words why no ratio is,
    and is empty where one is.
    """

    loss: np.ndarray
    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray
    reason: np.ndarray


class Fit(NamedTuple):
    """`loss = floor + factor * (flops / unit) ** -exponent`, from first to last."""

    floor: float
    factor: float
    exponent: float
    unit: float
    first: float
    last: float
    residual: float
    """Root mean square, nats, for the degrees of freedom that are left."""
    miss: float
    """The residual as a factor of compute, by the mean slope from first to last."""

    def loss(self, flops: Any) -> Any:
        """Gives the loss at a compute."""
        return self.floor + self.factor * (flops / self.unit) ** -self.exponent

    def flops(self, loss: Any) -> np.ndarray:
        """Gives the compute at a loss; infinite at the floor and below."""
        above = np.maximum(np.asarray(loss) - self.floor, 0.0)
        with np.errstate(divide="ignore"):
            return self.unit * (above / self.factor) ** (-1 / self.exponent)


def frontier(flops: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Indices, by rising compute, of runs better than all of no more compute."""
    order = np.lexsort((loss, flops))
    best = np.minimum.accumulate(loss[order])
    return order[np.diff(best, prepend=np.inf) < 0]


def fit(rows: list[dict[str, Any]], size: str) -> Fit | None:
    """Fits the frontier of a side's runs by least squares.

    Args:
      rows: the runs.
      size: one of `SIZES`.

    Returns:
      A falling curve whose floor is at least 0; None if the frontier has fewer than
      `MIN_POINTS` points.
    """
    column = "flops" if size == "exact" else "flops_6nd"
    flops, loss = (
        np.array([row[name] for row in rows if np.isfinite(row["loss"])], float)
        for name in (column, "loss")
    )
    taken = frontier(flops, loss)
    flops, loss = flops[taken], loss[taken]
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
    best = int(np.argmin(squares))
    residual = float(np.sqrt(squares[best] / (len(loss) - 3)))
    slope = (loss[0] - loss[-1]) / np.log(flops[-1] / flops[0])
    return Fit(
        *(float(floor[best]), float(factor[best]), float(_EXPONENTS[best]), unit),
        *(float(flops[0]), float(flops[-1])),
        *(residual, float(np.exp(residual / slope))),
    )


def resampled(
    rows: list[dict[str, Any]], size: str, count: int, seed: int
) -> list[Fit | None]:
    """Fits again and again trunks drawn with replacement, all branches of each.

    A trunk is a size and a seed.
    """
    trunks = sorted({_trunk(row) for row in rows})
    rng, known, found = np.random.default_rng(seed), {}, []
    for _ in range(count if trunks else 0):
        places = rng.choice(len(trunks), len(trunks))
        drawn = frozenset(trunks[place] for place in places)
        # Of a frontier it matters which runs are there, not how often.
        if drawn not in known:
            known[drawn] = fit([row for row in rows if _trunk(row) in drawn], size)
        found.append(known[drawn])
    return found


def _trunk(row: dict[str, Any]) -> tuple[int, int]:
    return int(row["size"]), int(row["seed"])


def curve(found: Fit | None) -> Curve:
    """Draws a fit where its runs are; not a number where there is none."""
    if found is None:
        return Curve(*np.full((2, NUM_POINTS), np.nan), np.array(np.nan))
    flops = np.geomspace(found.first, found.last, NUM_POINTS)
    return Curve(flops, found.loss(flops), np.array(found.residual))


def ratio(
    reference: Fit | None,
    side: Fit | None,
    resamples: tuple[Sequence[Fit | None], Sequence[Fit | None]] = ((), ()),
) -> Ratio:
    """Compares two fits where the runs of both have the loss.

    Args:
      reference: whose compute divides.
      side: whose compute is divided.
      resamples: fits of both to resampled runs. One that has no curve or does not
        come down to the loss counts as beyond either end, so that an interval is
        given only where 90 % are surely inside.
    """
    reason = _refusal(reference, side)
    nothing = np.full(NUM_POINTS, np.nan)
    if reason or reference is None or side is None:
        return Ratio(*[nothing] * 4, np.array(reason))
    losses = np.linspace(*_overlap(reference, side), NUM_POINTS)
    with np.errstate(invalid="ignore"):
        drawn = [
            nothing if a is None or b is None else b.flops(losses) / a.flops(losses)
            for a, b in zip(*resamples, strict=True)
        ]
    drawn = np.array(drawn or [nothing])
    known = np.isfinite(drawn) & (drawn > 0)
    low = np.quantile(np.where(known, drawn, 0.0), 0.05, 0, method="lower")
    high = np.quantile(np.where(known, drawn, np.inf), 0.95, 0, method="higher")
    bounded = (low > 0) & np.isfinite(high)
    return Ratio(
        losses,
        side.flops(losses) / reference.flops(losses),
        np.where(bounded, low, np.nan),
        np.where(bounded, high, np.nan),
        np.array(""),
    )


def _overlap(reference: Fit, side: Fit) -> tuple[float, float]:
    """Highest and lowest loss that the curves of both have within their compute."""
    high = min(float(x.loss(x.first)) for x in (reference, side))
    return high, max(float(x.loss(x.last)) for x in (reference, side))


def _refusal(reference: Fit | None, side: Fit | None) -> str:
    """Says why two sides have no ratio; empty if they have."""
    for name, each in (("the transformer", reference), ("this side", side)):
        if each is None:
            return f"the frontier of {name} has fewer than {MIN_POINTS} runs"
        if each.miss > MAX_MISS:
            return (
                f"the curve of {name} misses its runs by {each.residual:.3f} nats, a "
                f"factor of {each.miss:.2f} in compute"
            )
    assert reference is not None
    assert side is not None
    high, low = _overlap(reference, side)
    if high - low <= reference.residual + side.residual:
        return "the losses of the two do not overlap"
    return ""
