"""Intervals of a budget's optimum, from the resamples of a fit."""

import math
from typing import Literal, NamedTuple

import numpy as np

from scaling.fits import percentile_intervals, predict
from scaling.laws import Optimum
from scaling.plan.case import PlanCase, make_loss_model

_MAX_RESAMPLES = 200
"""Number of resamples if each needs a search."""
_HUGE_LOG_BUDGET = 2000.0
"""Log budget that is larger than any real one."""


class OptimumSpread(NamedTuple):
    """Intervals of the optimum over the resamples of a fit.

    Attributes:
      params: interval of the optimal parameters.
      tokens: interval of the optimal tokens.
      loss: interval of the loss of each resample's own optimum.
      flops: interval of the budget for the target loss, infinite for resamples that do
        not reach it; None without a target loss.
      num_resamples: number of resamples.
      num_without: number of resamples without an optimum, which are not used.
    """

    params: tuple[float, float]
    tokens: tuple[float, float]
    loss: tuple[float, float]
    flops: tuple[float, float] | None
    num_resamples: int
    num_without: int


def loss_interval(
    case: PlanCase, optimum: Optimum, kind: Literal["confidence", "prediction"]
) -> tuple[float, float] | None:
    """Returns the interval of the loss at the optimum; None for published constants."""
    fit = case.loss_model.fit
    if fit is None:
        return None
    num_params = optimum.num_params
    num_tokens = optimum.num_tokens
    if "num_unique_tokens" not in fit.inputs:
        num_params, num_tokens = case.worth(num_params, num_tokens)
    data = {"num_params": num_params, "num_tokens": num_tokens}
    data["num_unique_tokens"] = case.unique_tokens or num_tokens
    prediction = predict(fit, data, kind, level=case.level)
    ends = float(prediction.low[0]), float(prediction.high[0])
    return ends if all(map(math.isfinite, ends)) else None


def optimum_spread(case: PlanCase, optimum: Optimum) -> OptimumSpread | None:
    """Allocates the budget by each resample; None if fewer than two have optima."""
    fit = case.loss_model.fit
    law = case.loss_model.law
    if fit is None or fit.samples is None:
        return None
    samples = fit.sampled()
    if case.served or case.unique_tokens is not None:
        samples = samples[:_MAX_RESAMPLES]
    optima = []
    needed = []
    for sample in samples:
        named = dict(zip(law.coefficients, map(float, sample), strict=True))
        try:
            loss_model = make_loss_model(case.loss_model.name, law, named)
            changed = case._replace(loss_model=loss_model)
            allocation = changed.allocate()
            if case.target_loss is not None:
                try:
                    needed.append([math.log(changed.needed())])
                except ValueError:  # no budget reaches the loss
                    needed.append([_HUGE_LOG_BUDGET])
            optima.append([math.log(x) for x in allocation])
        except (ValueError, OverflowError):  # a resample without an optimum
            continue
    if len(optima) < 2:
        return None

    def interval(
        estimate: list[float], draws: list[list[float]]
    ) -> tuple[np.ndarray, np.ndarray]:
        return percentile_intervals(
            np.log(estimate),
            np.array(draws),
            case.level,
            loss=fit.loss,
            num_points=fit.num_points,
            k=fit.num_free,
        )

    low, high = np.exp(interval([*optimum], optima))
    flops = None
    if needed:
        log_low, log_high = (float(end[0]) for end in interval([case.flops], needed))
        flops = (
            math.exp(log_low),
            math.inf if log_high > _HUGE_LOG_BUDGET / 2 else math.exp(log_high),
        )
    return OptimumSpread(
        params=(float(low[0]), float(high[0])),
        tokens=(float(low[1]), float(high[1])),
        loss=(float(low[2]), float(high[2])),
        flops=flops,
        num_resamples=len(samples),
        num_without=len(samples) - len(optima),
    )
