"""Least squares of a few coefficients with exact derivatives, for small tables."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

type Residuals = Callable[
    [Float[np.ndarray, " k"]],
    tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n k"]],
]
"""coefficients -> residuals, and their derivatives."""


class Minimum(NamedTuple):
    """End of a minimization.

    Attributes:
      coefficients: the coefficients.
      objective: sum of Huber's losses of the residuals.
      is_converged: False if the number of steps was reached.
    """

    coefficients: Float[np.ndarray, " k"]
    objective: float
    is_converged: bool


def minimize_huber(
    residuals: Residuals,
    start: Float[np.ndarray, " k"],
    *,
    delta: float = np.inf,
    low: Float[np.ndarray, " k"] | float = -np.inf,
    high: Float[np.ndarray, " k"] | float = np.inf,
    max_steps: int = 300,
) -> Minimum:
    """Minimizes the sum of Huber's losses by Levenberg-Marquardt steps.

    Args:
      residuals: the residuals and their derivatives.
      start: first coefficients.
      delta: residual beyond which the loss is linear.
      low: lower bounds; a step that crosses one ends there.
      high: upper bounds.
      max_steps: largest number of steps.
    """
    x = np.clip(start, low, high)
    with np.errstate(all="ignore"):  # a step too far is refused by its objective
        return _descend(residuals, x, delta, low, high, max_steps)


def _descend(
    residuals: Residuals,
    x: Float[np.ndarray, " k"],
    delta: float,
    low: Float[np.ndarray, " k"] | float,
    high: Float[np.ndarray, " k"] | float,
    max_steps: int,
) -> Minimum:
    """Returns the end of the steps from x."""
    off, slopes = residuals(x)
    objective = _sum_losses(off, delta)
    damping = 1e-3
    for _ in range(max_steps):
        weights = 1 / np.maximum(np.abs(off) / delta, 1)
        gradient = slopes.T @ (weights * off)
        # A coefficient at a bound that the gradient pushes outward does not move.
        is_free = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
        if not is_free.any():
            return Minimum(x, objective, True)
        free = slopes[:, is_free]
        curvature = free.T @ (weights[:, None] * free)
        scale = np.maximum(np.diag(curvature), 1e-30)
        while damping < 1e12:
            step = np.zeros_like(x)
            damped = curvature + damping * np.diag(scale)
            step[is_free] = -np.linalg.lstsq(damped, gradient[is_free], rcond=None)[0]
            other = np.clip(x + step, low, high)
            other_off, other_slopes = residuals(other)
            reached = _sum_losses(other_off, delta)
            if reached < objective:
                break
            damping *= 4
        else:
            return Minimum(x, objective, True)
        gain = objective - reached
        x = other
        off = other_off
        slopes = other_slopes
        objective = reached
        damping = max(damping * 0.3, 1e-12)
        if gain <= 1e-12 * objective + 1e-300:
            return Minimum(x, objective, True)
    return Minimum(x, objective, False)


def _sum_losses(off: Float[np.ndarray, " n"], delta: float) -> float:
    size = np.abs(off)
    if not np.isfinite(size).all():
        return float("inf")
    clipped = np.minimum(size, delta)
    return float((clipped * (size - clipped / 2)).sum())
