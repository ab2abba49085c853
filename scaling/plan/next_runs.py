"""The next training runs: those that lower the variance of an answer most per FLOP.

The resamples of a fit are draws of the law. Over them, the answer that is asked for (a
loss at a target, the exponent of the optimum, the planned size) covaries with the
losses of candidate runs. If both are normal, a run with noise s lowers the variance of
the answer by `cov(answer, loss)^2 / (var(loss) + s^2)`. The decrease does not depend on
the loss that the run will have, and the covariances of the remaining candidates follow
in the same way, so several runs are chosen one after another without a refit.

Source: active selection of data for a point of interest, MacKay 1992, Neural
Computation 4(4), with the covariance of resampled fits in place of the curvature's; the
better of two greedy orders, Leskovec et al. 2007, KDD.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation


class RunChoice(NamedTuple):
    """Chosen candidates, in order.

    Attributes:
      places: indices of the candidates.
      flops: FLOPs of each.
      variance: variance of the answer after each run, over that before the first.
    """

    places: list[int]
    flops: list[float]
    variance: list[float]


@validation.checks_numbers(noise="(0, inf)", target="(0, inf)")
def evidence_variance(
    noise: float, flops: Float[np.ndarray, " candidates"], target: float
) -> Float[np.ndarray, " candidates"]:
    """Returns the variance of runs as evidence about a target with more compute.

    A law that lacks a curve of the data misses the target by an error that grows in
    proportion to ln(compute) (`fits.forecasts`), so that runs far below it are
    weaker evidence than their noise suggests: `noise (1 + ln(target / flops)^2)`.

    Args:
      noise: variance of log losses around the law.
      flops: compute of each run.
      target: compute of the target.
    """
    return noise * (1 + np.maximum(np.log(target / flops), 0.0) ** 2)


@validation.checks_numbers(budget="(0, inf)", max_runs=1)
def choose_next_runs(
    answer: Float[np.ndarray, " resamples"],
    log_losses: Float[np.ndarray, "resamples candidates"],
    noise_variance: Float[np.ndarray, " candidates"],
    flops: Float[np.ndarray, " candidates"],
    *,
    budget: float,
    max_runs: int = 1,
) -> RunChoice:
    """Chooses runs within a budget that lower the variance of an answer.

    Each run is the one with the largest decrease for each FLOP; or, if the variance is
    lower in the end, the one with the largest decrease that the budget still allows.

    Args:
      answer: the answer by each resample of a fit.
      log_losses: logarithm of each candidate's loss by each resample.
      noise_variance: variance of each candidate's log loss around the law, above 0.
      flops: compute of each candidate, above 0.
      budget: total compute in FLOPs.
      max_runs: largest number of runs; each candidate is chosen once.

    Returns:
      The choice; empty if no candidate is within the budget or lowers the variance.

    Raises:
      ValueError: the answer does not vary, or a noise or compute is not above 0.
    """
    if not (np.all(noise_variance > 0) and np.all(flops > 0)):
        raise ValueError("noise_variance and flops must be above 0")
    first = np.cov(np.column_stack([answer, log_losses]), rowvar=False)
    if not first[0, 0] > 0:
        raise ValueError("answer must vary over the resamples")
    choices = []
    for cost in (flops, np.ones_like(flops)):
        covariance = first
        choice = RunChoice([], [], [])
        is_free = np.ones(flops.size, bool)
        remaining = budget
        while len(choice.places) < max_runs:
            total = np.diagonal(covariance)[1:] + noise_variance
            gain = covariance[0, 1:] ** 2 / total / cost
            gain = np.where(is_free & (flops <= remaining), gain, 0.0)
            place = int(np.argmax(gain))
            if not gain[place] > 0:
                break
            row = covariance[1 + place]
            covariance = covariance - np.outer(row, row) / total[place]
            is_free[place] = False
            remaining -= float(flops[place])
            choice.places.append(place)
            choice.flops.append(float(flops[place]))
            choice.variance.append(max(float(covariance[0, 0] / first[0, 0]), 0.0))
        choices.append(choice)
    return min(choices, key=lambda choice: choice.variance[-1:] or [1.0])
