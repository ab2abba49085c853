"""Whether a law follows its runs: how far residuals reach, and whether they arch."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import special

# Where doubt begins: of sound surfaces (the experiment `fit_coverage`), of 32 and 240
# runs with normal or heavy-tailed noise, fewer than one in a hundred is beyond these.
_LARGE = 0.05
"""Residual, of logarithms, beyond which one run in ten is far off."""
_LARGE_SHARE = 0.1
"""The same, of how far the runs' losses lie apart: of noisy ones it may be larger."""
_ARCH_SHARE = 0.1
"""Share of the residuals' squares that smooth curves may take."""
_EXACT = 1e-5
"""Residual below which runs lie on the law, whatever is left."""
CHANCE = 1e-3
"""Probability below which a finding is not taken for chance."""


class Goodness(NamedTuple):
    """Sizes of residuals, of logarithms.

    Attributes:
      half: half of them are smaller.
      most: nine tenths are.
      worst: the largest.
    """

    half: float
    most: float
    worst: float


def measure_goodness(residuals: Float[np.ndarray, " n"]) -> Goodness:
    """Measures residuals of logarithms."""
    size = np.abs(residuals)
    return Goodness(*(float(np.quantile(size, share)) for share in (0.5, 0.9, 1.0)))


def is_far(residuals: Float[np.ndarray, " n"], target: Float[np.ndarray, " n"]) -> bool:
    """Tells whether one run in ten is farther off than a law of losses should be.

    Args:
      residuals: of logarithms.
      target: logarithms of what was seen.
    """
    low, high = np.quantile(target, (0.05, 0.95))
    return measure_goodness(residuals).most > max(
        _LARGE, _LARGE_SHARE * float(high - low)
    )


def find_arch(
    residuals: Float[np.ndarray, " n"],
    slopes: Float[np.ndarray, "n k"],
    inputs: Float[np.ndarray, "inputs n"],
    num_runs: int,
) -> float:
    """Looks for a smooth curve in residuals that the law itself cannot follow.

    An F test of squares, cubes and products of the inputs' logarithms beside the law's
    own slopes; residuals are clipped at three spreads, so that no outlier bends them.

    Args:
      residuals: of logarithms.
      slopes: of the law, by coefficient.
      inputs: logarithms.
      num_runs: how many rows tell of their own; fewer than there are where runs have
        several.

    Returns:
      The share of the residuals' squares that the curve takes; 0 where it may be
      chance, or there are too few rows to tell.
    """
    x = inputs - inputs.mean(1, keepdims=True)
    x = x / np.maximum(x.std(1, keepdims=True), 1e-300)
    powers = [
        np.prod(x[list(which)], 0)
        for degree in (2, 3)
        for which in itertools.combinations_with_replacement(range(len(x)), degree)
    ]
    freedom = num_runs - slopes.shape[1] - len(powers)
    if freedom < len(powers):
        return 0.0
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    seen = np.clip(residuals, -3 * spread, 3 * spread)
    scale = np.maximum(np.abs(slopes).max(0), 1e-300)
    plain = _left(seen, slopes / scale)
    curved = _left(seen, np.concatenate([slopes / scale, np.stack(powers, 1)], 1))
    share = 1 - curved / max(plain, 1e-300)
    if share < _ARCH_SHARE or spread < _EXACT:
        return 0.0
    ratio = (plain - curved) / len(powers) / max(curved / freedom, 1e-300)
    return share if f_test_p_value(ratio, len(powers), freedom) < CHANCE else 0.0


def f_test_p_value(ratio: float, freedom: int, freedom_below: int) -> float:
    """Gives the probability of a larger F; 0.0552 for 2.71 with 4 and 23 degrees.

    Args:
      ratio: of two mean squares.
      freedom: of the upper one, at least 1.
      freedom_below: of the lower one, at least 1.
    """
    return float(special.fdtrc(freedom, freedom_below, max(ratio, 0.0)))


def _left(y: np.ndarray, columns: np.ndarray) -> float:
    """The sum of squares that least squares on some columns leave."""
    basis = np.linalg.qr(columns)[0]
    rest = y - basis @ (basis.T @ y)
    return float(rest @ rest)


def is_coverage_low(covered: float, num_points: int) -> bool:
    """Tells whether 90 % intervals hold too few of the runs to be believed.

    Args:
      covered: the share of runs inside.
      num_points: of them.

    Returns:
      Whether it is below 80 % and three standard errors short; errors of runs beyond
      the fitted ones have much in common, so that less says nothing.
    """
    error = math.sqrt(0.9 * (1 - 0.9) / num_points)
    return covered < min(0.9 - 0.1, 0.9 - 3 * error)


def percentages(sizes: Sequence[float]) -> str:
    """Writes sizes of residuals, such as "0.42, 1.9 and 12 %"."""
    first = ", ".join(f"{100 * x:.2g}" for x in sizes[:-1])
    return f"{first} and {100 * sizes[-1]:.2g} %"
