"""What a plan is made for: a law that is believed, a device, a budget, its limits."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from scaling.fits import FitResult
from scaling.laws import Law, Optimum, TwoPowers
from scaling.plan import budgets, pricing
from scaling.plan.budgets import DataLimit, HalfLives
from scaling.plan.designs import Count, DesignFamily
from scaling.plan.pricing import DAY_S, HOUR_S, Offer


class LossModel(NamedTuple):
    """What is believed of losses.

    Attributes:
      name: of the constants, or the file.
      law: the law.
      coefficients: by name.
      powers: how it falls with parameters and tokens.
      half_lives: of repeated data.
      fit: it comes from, or None for published constants.
      count: which parameters it counts; None where it does not say.
      doubts: about the log behind it, in sentences.
      shape: what its runs have in common, as `folder.shared_shape` gives it.
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
    """Reads a belief off a law's coefficients.

    Raises:
      ValueError: they are no numbers, or have no compute optimum.
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
    """What operations of training take.

    Attributes:
      flops: the operations.
      device_s: seconds of one device; None without a device.
      usd: their price; None without one.
    """

    flops: float
    device_s: float | None
    usd: float | None


class PlanCase(NamedTuple):
    """What a plan is made for.

    Attributes:
      belief: of losses.
      family: of the architectures, with what N counts.
      offers: of devices.
      flops: the budget, as operations at the training's utilisation.
      mfu: share of a device's peak that training reaches, in (0, 1].
      served: tokens to serve, weighted with how much worse serving uses devices.
      unique_tokens: that there are; None: as many as are needed.
      target_loss: that the budget is to reach, if it is what was asked for.
      days: that training may take, if they are limited.
      devices: how many there are, if that is given.
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
        """The best offer, or None where there is none."""
        return pricing.best_offer(self.offers, self.mfu) if self.offers else None

    @property
    def repeating(self) -> DataLimit | None:
        """The tokens there are, and what repeating them is worth."""
        if self.unique_tokens is None:
            return None
        return DataLimit(self.unique_tokens, self.loss_model.half_lives)

    def loss(self, num_params: Any, num_tokens: Any) -> Any:
        """The loss that is believed, repetition included."""
        return budgets.budget_loss(
            self.loss_model.powers, num_params, num_tokens, self.repeating
        )

    def worth(self, num_params: Any, num_tokens: Any) -> tuple[Any, Any]:
        """Parameters and tokens, less what repetition takes."""
        powers = self.loss_model.powers
        return budgets.effective_sizes(powers, num_params, num_tokens, self.repeating)

    def allocate(self) -> Optimum:
        """The best division of the budget."""
        how: Any = {"inference_tokens": self.served, "repeating": self.repeating}
        return budgets.allocate_budget(self.loss_model.powers, self.flops, **how)

    def needed(self) -> float:
        """The smallest budget that reaches the loss that is asked for.

        Raises:
          ValueError: none does.
        """
        assert self.target_loss is not None
        how: Any = {"inference_tokens": self.served, "repeating": self.repeating}
        return budgets.needed_budget(self.loss_model.powers, self.target_loss, **how)

    def bill(self, flops: float) -> TrainingCost:
        """What so many operations of training take."""
        if (offer := self.offer) is None:
            return TrainingCost(flops, None, None)
        device_s = flops / (offer.flops_per_s * self.mfu)
        price = offer.usd_per_hour
        return TrainingCost(flops, device_s, price and device_s / HOUR_S * price)

    def division(self, device_s: float | None) -> tuple[int | None, float | None]:
        """How many devices train for how many seconds, where one of both is given."""
        duration_s = None if self.days is None else self.days * DAY_S
        if device_s is None:
            return self.devices, duration_s
        if self.devices is not None:
            return self.devices, device_s / self.devices
        if duration_s is None:
            return None, None
        # What is a whole number but for rounding shall not need one device more.
        number = max(1, math.ceil(device_s / duration_s * (1 - 1e-12)))
        return number, device_s / number
