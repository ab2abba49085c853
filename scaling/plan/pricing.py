"""Rental offers of accelerators: price, rate, and choice of the best."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv import validation
from scaling.costs import find_device

HOUR_S = 3600.0
DAY_S = 86_400.0


class Offer(NamedTuple):
    """An accelerator for rent.

    Attributes:
      name: name in the offer.
      usd_per_hour: price in USD per hour, or None if not given.
      flops_per_s: peak rate, of dense 16-bit products unless the offer has another.
      memory_bytes: memory of the data sheet, or None if the name is not in `devices`.
    """

    name: str
    usd_per_hour: float | None
    flops_per_s: float
    memory_bytes: float | None

    def flops_per_usd(self, mfu: float) -> float:
        """Returns the operations per dollar.

        An A100 at 312 TFLOP/s, 4 USD an hour and 40 %: 1.1232e17.

        Args:
          mfu: model FLOPs utilization, in (0, 1].

        Raises:
          ValueError: the offer has no price.
        """
        if self.usd_per_hour is None:
            raise ValueError(f"{self.name} has no price: NAME:USD_PER_HOUR:TFLOPS")
        return self.flops_per_s * mfu * HOUR_S / self.usd_per_hour


def parse_offer(text: str) -> Offer:
    """Parses an offer, `NAME:USD_PER_HOUR:TFLOPS`.

    The rate is optional for devices in `devices`, and so is the price.

    Raises:
      ValueError: a part is missing or not a positive number, or the device is unknown
        and has no rate.
    """
    name, *numbers = (part.strip() for part in text.split(":"))
    if not name or len(numbers) > 2:
        raise ValueError(f"{text!r} must be NAME:USD_PER_HOUR:TFLOPS")
    values = []
    for part, what in zip(numbers, ("price", "TFLOP/s"), strict=False):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(
                f"{text!r} must be NAME:USD_PER_HOUR:TFLOPS, and {part!r} is no "
                f"positive {what}"
            )
        values.append(value)
    try:
        device = find_device(name)
    except ValueError:
        if len(values) < 2:
            raise
        device = None
    price = values[0] if values else None
    if len(values) == 2:
        rate = values[1] * 1e12
    else:
        assert device is not None
        rate = device.bfloat16
    return Offer(name, price, rate, device.sheet_bytes if device else None)


@validation.checks_numbers(mfu="(0, 1]")
def best_offer(offers: Sequence[Offer], mfu: float) -> Offer:
    """Chooses the offer with the most operations per dollar; the first of equals.

    Args:
      offers: at least one offer; several must all have a price.
      mfu: model FLOPs utilization on all of them, in (0, 1].

    Raises:
      ValueError: one of several has no price.
    """
    if len(offers) == 1:
        return offers[0]
    return max(offers, key=lambda offer: offer.flops_per_usd(mfu))
