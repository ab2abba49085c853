"""Searching learning rates: the next one to try, and powers through the best ones."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from scaling.fits import intervals


def next_rate(trials: Sequence[tuple[float, float]]) -> float:
    """The next rate to try: beyond the best if that is an edge, else beside it.

    Trials are rates and their losses, three or more; one that is not finite diverged.
    An edge is left by the grid's own factor. Between two rates goes the trial on the
    side of the better neighbour, halfway in the logarithm.
    """
    rates, losses = zip(*sorted(trials), strict=True)
    losses = [loss if np.isfinite(loss) else np.inf for loss in losses]
    best = int(np.argmin(losses))
    if best == 0:
        return rates[0] ** 2 / rates[1]
    if best == len(rates) - 1:
        return rates[-1] ** 2 / rates[-2]
    beside = best - 1 if losses[best - 1] < losses[best + 1] else best + 1
    return float(np.sqrt(rates[best] * rates[beside]))


class Powers(NamedTuple):
    """`rate = coefficient width^of_width tokens^of_tokens`, with half intervals.

    Not numbers where there are too few optima.
    """

    coefficient: float
    of_width: float
    of_width_half: float
    of_tokens: float
    of_tokens_half: float


def fit_powers(
    width: Float[np.ndarray, " optima"],
    num_tokens: Float[np.ndarray, " optima"],
    rate: Float[np.ndarray, " optima"],
    *,
    level: float,
) -> Powers:
    """Lays powers through optima by least squares in logarithms.

    `level` is the probability of the intervals, which are Student's, in (0, 1).

    Source: the form is that of Li et al. 2025 (Step Law), arXiv:2503.04715, section 3.
    """
    design = np.stack([np.ones(len(rate)), np.log(width), np.log(num_tokens)], 1)
    freedom = len(rate) - 3
    if freedom < 1 or np.linalg.matrix_rank(design) < 3:
        return Powers(*[float("nan")] * 5)
    found = np.linalg.lstsq(design, np.log(rate), rcond=None)[0]
    residuals = np.log(rate) - design @ found
    covariance = np.linalg.inv(design.T @ design) * (residuals @ residuals) / freedom
    half = intervals.student(level, freedom) * np.sqrt(np.diagonal(covariance))
    return Powers(
        coefficient=float(np.exp(found[0])),
        of_width=float(found[1]),
        of_width_half=float(half[1]),
        of_tokens=float(found[2]),
        of_tokens_half=float(half[2]),
    )
