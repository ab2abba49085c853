"""Spread of requests' latencies that a simulated server lacks.

Clients, detokenisers and the first seconds of a server stall, and steps vary. A
simulation has none of that, so its P99 is too low. The logarithms of latencies are
taken to have one further term, of Student's t distribution, whose scale is that of
measured stages: the excess of P99 over the median, beyond the simulated one.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation

SMALLEST_SCALE = 0.005
"""Scale that a stage without an excess counts as, so that its logarithm is finite."""


class RequestNoise(NamedTuple):
    """Scale of the noise of end-to-end (and inter-token) and of first-token times."""

    scale: Float[np.ndarray, " 2"]
    """Scale of the logarithm: a median over stages."""
    doubt: Float[np.ndarray, " 2"]
    """Standard deviation of the logarithm of the scale over stages."""


@validation.checks_numbers(level="(0, 1)")
def noise_quantile(level: float) -> float:
    """Returns a quantile of Student's t distribution with 4 degrees of freedom.

    Args:
      level: probability in (0, 1).

    Source: Shaw 2006, "Sampling Student's t distribution", equation 36.
    """
    root = math.sqrt(4 * level * (1 - level))
    size = 2 * math.sqrt(max(math.cos(math.acos(root) / 3) / root - 1, 0.0))
    return math.copysign(size, level - 0.5)


def find_request_noise(
    measured: Float[np.ndarray, "stages 2"], simulated: Float[np.ndarray, "stages 2"]
) -> RequestNoise:
    """Finds the noise that the tails of measured stages have beyond simulated ones.

    Args:
      measured: logarithms of P99 over the median of each stage, of end-to-end and
        first-token times.
      simulated: the same of simulated stages.
    """
    excess = np.sqrt(np.maximum(measured**2 - simulated**2, 0.0))
    scales = np.maximum(excess / noise_quantile(0.99), SMALLEST_SCALE)
    middle = np.median(scales, axis=0)
    return RequestNoise(middle, np.sqrt(np.mean(np.log(scales / middle) ** 2, axis=0)))


@validation.checks_numbers(level="[0.5, 1)", scale="[0, 100]")
def tail_factor(
    values: Float[np.ndarray, "*draws"],
    median: Float[np.ndarray, "*draws"],
    level: float,
    scale: Float[np.ndarray, "*draws"] | float,
) -> Float[np.ndarray, "*draws"]:
    """Returns the factor by which noise moves a percentile above the median.

    Distances from the median are added as those of normal distributions, by their
    squares; the factor is 1 at the median.

    Args:
      values: simulated percentiles.
      median: simulated medians.
      level: probability of the percentile, in (0.5, 1).
      scale: scale of the noise.
    """
    distance = np.log(np.maximum(values / median, 1.0))
    return np.exp(np.hypot(distance, noise_quantile(level) * scale) - distance)
