"""Goodness of fit: sizes of residuals, and smooth curves in them."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import special

from jaxkv import validation

# Thresholds: of sound surfaces (the experiment `fit_coverage`) of 32 and 240 runs with
# normal or heavy-tailed noise, fewer than one in a hundred exceeds them.
_LARGE_RESIDUAL = 0.05
"""Log residual exceeded by one run in ten that counts as large."""
_LARGE_SHARE = 0.1
"""The same as a share of the spread of the runs' losses; the larger limit applies."""
_ARCH_SHARE = 0.1
"""Share of the residuals' squares that smooth curves may explain."""
_EXACT = 1e-5
"""Residual below which runs follow the law exactly."""
CHANCE = 1e-3
"""Significance level of the F test."""


class Goodness(NamedTuple):
    """Quantiles of the absolute log residuals.

    Attributes:
      half: median.
      most: 90th percentile.
      worst: maximum.
    """

    half: float
    p90: float
    worst: float


def measure_goodness(residuals: Float[np.ndarray, " n"]) -> Goodness:
    """Returns quantiles of log residuals."""
    size = np.abs(residuals)
    return Goodness(*(float(np.quantile(size, share)) for share in (0.5, 0.9, 1.0)))


def is_far(residuals: Float[np.ndarray, " n"], target: Float[np.ndarray, " n"]) -> bool:
    """Returns True if one run in ten has a large residual for a law of losses.

    Args:
      residuals: log residuals.
      target: logarithms of the observed target.
    """
    low, high = np.quantile(target, (0.05, 0.95))
    return measure_goodness(residuals).p90 > max(
        _LARGE_RESIDUAL, _LARGE_SHARE * float(high - low)
    )


def find_arch(
    residuals: Float[np.ndarray, " n"],
    slopes: Float[np.ndarray, "n k"],
    inputs: Float[np.ndarray, "inputs n"],
    num_runs: int,
) -> float:
    """Tests residuals for a smooth curve that the law itself cannot follow.

    An F test of squares, cubes and products of the log inputs in addition to the law's
    own slopes; residuals are clipped at three spreads, so that no outlier dominates.

    Args:
      residuals: log residuals.
      slopes: derivatives of the law by its coefficients.
      inputs: log inputs.
      num_runs: number of independent rows; fewer than all if runs have several rows.

    Returns:
      The share of the residuals' squares that the curve explains; 0 if it is not
      significant, or if there are too few rows.
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
    clipped_residuals = np.clip(residuals, -3 * spread, 3 * spread)
    scale = np.maximum(np.abs(slopes).max(0), 1e-300)
    plain = _left(clipped_residuals, slopes / scale)
    curved = _left(
        clipped_residuals, np.concatenate([slopes / scale, np.stack(powers, 1)], 1)
    )
    share = 1 - curved / max(plain, 1e-300)
    if share < _ARCH_SHARE or spread < _EXACT:
        return 0.0
    ratio = (plain - curved) / len(powers) / max(curved / freedom, 1e-300)
    return share if f_test_p_value(ratio, len(powers), freedom) < CHANCE else 0.0


@validation.checks_numbers(ratio="(-inf, inf)")
def f_test_p_value(ratio: float, freedom: int, freedom_below: int) -> float:
    """Returns the probability of a larger F; 0.0552 for 2.71 with 4 and 23 degrees.

    Args:
      ratio: ratio of two mean squares.
      freedom: degrees of freedom of the numerator, at least 1.
      freedom_below: degrees of freedom of the denominator, at least 1.
    """
    return float(special.fdtrc(freedom, freedom_below, max(ratio, 0.0)))


def _left(y: np.ndarray, columns: np.ndarray) -> float:
    """Returns the residual sum of squares of least squares on some columns."""
    basis = np.linalg.qr(columns)[0]
    remainder = y - basis @ (basis.T @ y)
    return float(remainder @ remainder)


def is_coverage_low(covered: float, num_points: int) -> bool:
    """Returns True if 90 % intervals have too few of the held-out runs inside.

    Args:
      covered: share of runs inside.
      num_points: number of runs.

    Returns:
      True if the share is below 80 % and more than three standard errors too low.
      Errors of runs beyond the fitted range are correlated, so the limit is wide.
    """
    error = math.sqrt(0.9 * (1 - 0.9) / num_points)
    return covered < min(0.9 - 0.1, 0.9 - 3 * error)


def percentages(sizes: Sequence[float]) -> str:
    """Formats sizes of residuals, such as "0.42, 1.9 and 12 %"."""
    first = ", ".join(f"{100 * x:.2g}" for x in sizes[:-1])
    return f"{first} and {100 * sizes[-1]:.2g} %"
