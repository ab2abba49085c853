"""The inputs of a plan: loss model, model family, devices, budget and limits."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from scaling.fits import FitResult
from scaling.laws import Amount, Law, Optimum, TwoPowers
from scaling.plan import budgets, pricing
from scaling.plan.budgets import DataLimit, HalfLives
from scaling.plan.designs import Count, DesignFamily
from scaling.plan.pricing import DAY_S, HOUR_S, Offer


class LossModel(NamedTuple):
    """A law with coefficients, as a model of the loss.

    Attributes:
      name: name of the constants, or of the file.
      law: the law.
      coefficients: coefficients by name.
      powers: its dependence on parameters and tokens.
      half_lives: half-lives of repeated data.
      fit: the fit, or None for published constants.
      count: parameters that the law counts; None if unknown.
      doubts: warnings about the fitted log, in sentences.
      shape: common sizes of the fitted runs, from `folder.shared_shape`.
    """

    name: str
    law: Law
    coefficients: Mapping[str, float]
    powers: TwoPowers
    half_lives: HalfLives
    fit: FitResult | None = None
    count: Count | None = None
    doubts: tuple[str, ...] = ()
    shape: Mapping[str, int | bool] = MappingProxyType({})


def make_loss_model(name: str, law: Law, coefficients: Mapping[str, Any]) -> LossModel:
    """Makes a loss model of a law and its coefficients.

    Raises:
      ValueError: a coefficient is no number, or there is no compute optimum.
    """
    for key, value in coefficients.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{law.name} with {key}={value!r}, no number")
    half_lives = budgets.MUENNIGHOFF
    if law.name == "data-constrained":
        half_lives = HalfLives(coefficients["R_D"], coefficients["R_N"])
        if not min(half_lives) > 0:
            raise ValueError("R_D and R_N must be positive")
    powers = budgets.law_two_powers(law, coefficients)
    return LossModel(name, law, coefficients, powers, half_lives)


class TrainingCost(NamedTuple):
    """Cost of a training run.

    Attributes:
      flops: operations.
      device_s: device-seconds; None without a device.
      usd: price in USD; None without a price.
    """

    flops: float
    device_s: float | None
    usd: float | None


class PlanCase(NamedTuple):
    """The inputs of a plan.

    Attributes:
      loss_model: model of the loss.
      family: family of architectures, with the convention for N.
      offers: offers of devices.
      flops: the budget, as operations at the training's utilization.
      mfu: model FLOPs utilization of training, in (0, 1].
      served: tokens to serve, weighted by the ratio of training and serving
        utilization.
      unique_tokens: number of unique tokens; None means no limit.
      target_loss: loss to reach, if the budget is computed from it.
      days: limit on the training time, or None.
      devices: number of devices, or None.
      level: probability of intervals, in (0, 1).
    """

    loss_model: LossModel
    family: DesignFamily
    offers: tuple[Offer, ...] = ()
    flops: float = math.nan
    mfu: float = 0.4
    served: float = 0.0
    unique_tokens: float | None = None
    target_loss: float | None = None
    days: float | None = None
    devices: int | None = None
    level: float = 0.9

    @property
    def offer(self) -> Offer | None:
        """The best offer, or None without offers."""
        return pricing.best_offer(self.offers, self.mfu) if self.offers else None

    @property
    def repeating(self) -> DataLimit | None:
        """Limit on unique tokens, with half-lives, or None."""
        if self.unique_tokens is None:
            return None
        return DataLimit(self.unique_tokens, self.loss_model.half_lives)

    def loss(self, num_params: Amount, num_tokens: Amount) -> Any:
        """Returns the predicted loss, with repetition of tokens."""
        return budgets.budget_loss(
            self.loss_model.powers, num_params, num_tokens, self.repeating
        )

    def worth(self, num_params: Amount, num_tokens: Amount) -> tuple[Any, Any]:
        """Returns effective parameters and tokens, with repetition of tokens."""
        powers = self.loss_model.powers
        return budgets.effective_sizes(powers, num_params, num_tokens, self.repeating)

    def allocate(self) -> Optimum:
        """Returns the optimal division of the budget."""
        return budgets.allocate_budget(
            self.loss_model.powers,
            self.flops,
            inference_tokens=self.served,
            repeating=self.repeating,
        )

    def needed(self) -> float:
        """Returns the smallest budget that reaches the target loss.

        Raises:
          ValueError: no budget reaches it.
        """
        assert self.target_loss is not None
        return budgets.needed_budget(
            self.loss_model.powers,
            self.target_loss,
            inference_tokens=self.served,
            repeating=self.repeating,
        )

    def bill(self, flops: float) -> TrainingCost:
        """Returns the cost of a number of training operations."""
        if (offer := self.offer) is None:
            return TrainingCost(flops, None, None)
        device_s = flops / (offer.flops_per_s * self.mfu)
        price = offer.usd_per_hour
        return TrainingCost(flops, device_s, price and device_s / HOUR_S * price)

    def division(self, device_s: float | None) -> tuple[int | None, float | None]:
        """Returns the number of devices and their seconds, if one of both is given."""
        duration_s = None if self.days is None else self.days * DAY_S
        if device_s is None:
            return self.devices, duration_s
        if self.devices is not None:
            return self.devices, device_s / self.devices
        if duration_s is None:
            return None, None
        # Rounding must not add a device to a whole number.
        number = max(1, math.ceil(device_s / duration_s * (1 - 1e-12)))
        return number, device_s / number
