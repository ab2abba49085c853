"""Three forecasts of a loss as distributions: a law, a line, and the last loss.

A forecast is a set of quantiles of ln L at `LEVELS`, so that all of them have the same
scores: error, coverage, and the continuous ranked probability score.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from scaling import fits
from scaling.laws import find_law

LEVELS = np.linspace(0.02, 0.98, 49)
"""Probabilities of the quantiles; the middle one is the median."""


class LadderRuns(NamedTuple):
    """Scored runs of a ladder.

    Attributes:
      num_params: parameters.
      num_tokens: trained tokens.
      flops: exact FLOPs of a run.
      loss: held-out nats per token.
      trunk: index of the trunk that a run branches from: its width, rate and seed.
      budget: index of the budget.
    """

    num_params: Float[np.ndarray, " runs"]
    num_tokens: Float[np.ndarray, " runs"]
    flops: Float[np.ndarray, " runs"]
    loss: Float[np.ndarray, " runs"]
    trunk: Int[np.ndarray, " runs"]
    budget: Int[np.ndarray, " runs"]

    def up_to(self, num_budgets: int) -> "LadderRuns":
        """Returns the runs of the smallest budgets."""
        mask = self.budget < num_budgets
        return LadderRuns(*(column[mask] for column in self))

    def columns(self) -> dict[str, Float[np.ndarray, " runs"]]:
        """Returns the columns of a fit."""
        return {x: getattr(self, x) for x in ("num_params", "num_tokens", "loss")}

    def best_losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns FLOPs and mean loss of the best size of each budget."""
        flops = []
        losses = []
        for budget in np.unique(self.budget):
            mask = self.budget == budget
            sizes = np.unique(self.num_params[mask])
            means = [self.loss[mask & (self.num_params == n)].mean() for n in sizes]
            flops.append(self.flops[mask].mean())
            losses.append(min(means))
        return np.array(flops), np.array(losses)


type Targets = Mapping[str, Float[np.ndarray, " targets"]]
"""Columns `num_params`, `num_tokens` and `flops`."""
type Forecast = Float[np.ndarray, "levels targets"]
"""Quantiles of ln L at `LEVELS`."""


def forecast_by_law(
    name: str, runs: LadderRuns, at: Targets, num_resamples: int
) -> Forecast:
    """Forecasts by a fitted law; trunks are resampled, not rows."""
    columns = runs.columns()
    fit = fits.fit(find_law(name), columns, cluster=runs.trunk)
    fit = fits.bootstrap(fit, columns, num_resamples=num_resamples, cluster=runs.trunk)
    middle = len(LEVELS) // 2
    quantiles = np.empty((len(LEVELS), len(at["flops"])))
    for i in range(middle):
        level = float(LEVELS[-1 - i] - LEVELS[i])
        interval = fits.predict(fit, at, "prediction", level)
        quantiles[i] = np.log(interval.low)
        quantiles[-1 - i] = np.log(interval.high)
        quantiles[middle] = np.log(interval.loss)
    return quantiles


def forecast_by_line(runs: LadderRuns, at: Targets) -> Forecast:
    """Forecasts by a straight line of the best ln L on ln C, with Student's t."""
    flops, loss = runs.best_losses()
    x = np.log(flops)
    y = np.log(loss)
    slope, intercept = np.polyfit(x, y, 1)
    freedom = len(x) - 2
    variance = ((y - intercept - slope * x) ** 2).sum() / freedom
    new = np.log(at["flops"])
    spread = 1 + 1 / len(x) + (new - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    t = stats.t.ppf(LEVELS, freedom)[:, None]
    return intercept + slope * new + t * np.sqrt(variance * spread)


def forecast_by_last(runs: LadderRuns, at: Targets) -> Forecast:
    """Forecasts no change, with the spread of changes at such ratios of compute.

    The spread grows with the logarithm of the ratio, by the ladder's own changes.
    """
    flops, loss = runs.best_losses()
    x = np.log(flops)
    y = np.log(loss)
    first, second = np.triu_indices(len(x), 1)
    slope = np.sqrt(np.mean(((y[second] - y[first]) / (x[second] - x[first])) ** 2))
    spread = slope * np.maximum(np.log(at["flops"]) - x[-1], 0)
    return y[-1] + stats.norm.ppf(LEVELS)[:, None] * spread


def make_forecasts(
    law: str, runs: LadderRuns, at: Targets, num_resamples: int
) -> dict[str, Forecast]:
    """Returns the forecasts of all methods by name; a method that fails is absent."""
    makers: dict[str, Callable[[], Forecast]] = {
        law: lambda: forecast_by_law(law, runs, at, num_resamples),
        "log-linear": lambda: forecast_by_line(runs, at),
        "last loss": lambda: forecast_by_last(runs, at),
    }
    return {name: make() for name, make in makers.items()}


class ForecastScore(NamedTuple):
    """Scores of a forecast of one loss.

    Attributes:
      error: ln(forecast / observed), at the median.
      is_covered: True if the observed loss is inside the central interval.
      crps: continuous ranked probability score in ln L; 0 is exact.
    """

    error: float
    is_covered: bool
    crps: float


def score_forecast(
    quantiles: Float[np.ndarray, " levels"], loss: float, level: float
) -> ForecastScore:
    """Scores quantiles of ln L against a loss.

    The CRPS is twice the mean of the pinball losses of the quantiles (Gneiting and
    Raftery 2007, section 4.2).

    Args:
      quantiles: quantiles at `LEVELS`.
      loss: observed loss.
      level: probability of the central interval.
    """
    observed = np.log(loss)
    low, high = np.interp([(1 - level) / 2, (1 + level) / 2], LEVELS, quantiles)
    gap = observed - quantiles
    pinball = np.where(gap >= 0, LEVELS * gap, (LEVELS - 1) * gap)
    return ForecastScore(
        error=float(quantiles[len(LEVELS) // 2] - observed),
        is_covered=bool(low <= observed <= high),
        crps=float(2 * pinball.mean()),
    )
