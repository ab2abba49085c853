"""Offers of accelerators: what an hour costs and computes, and the best."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from scaling.costs import devices

HOUR_S = 3600.0
DAY_S = 86_400.0


class Offer(NamedTuple):
    """An accelerator that can be rented.

    Attributes:
      name: as it was offered.
      usd_per_hour: its price, or None where it does not matter.
      flops_per_s: its peak, of dense 16-bit products unless the offer said otherwise.
      memory_bytes: of one, or None where the name is not in `devices`.
    """

    name: str
    usd_per_hour: float | None
    flops_per_s: float
    memory_bytes: float | None

    def flops_per_usd(self, mfu: float) -> float:
        """Operations that a dollar buys.

        An A100 at 312 TFLOP/s, 4 USD an hour and 40 %: 1.1232e17.

        Args:
          mfu: the share of the peak that a model's operations reach, in (0, 1].

        Raises:
          ValueError: the offer has no price.
        """
        if self.usd_per_hour is None:
            raise ValueError(f"{self.name} has no price: NAME:USD_PER_HOUR:TFLOPS")
        return self.flops_per_s * mfu * HOUR_S / self.usd_per_hour


def parse_offer(text: str) -> Offer:
    """Reads an offer, `NAME:USD_PER_HOUR:TFLOPS`.

    The rate may be left out for devices that `devices` knows, and with it the price.

    Raises:
      ValueError: a part is missing or not a positive number, or the device is not
        known and has no rate.
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
        known = devices.find(name)
    except ValueError:
        if len(values) < 2:
            raise
        known = None
    price = values[0] if values else None
    if len(values) == 2:
        rate = values[1] * 1e12
    else:
        assert known is not None
        rate = known.bfloat16
    return Offer(name, price, rate, known.memory_bytes if known else None)


def best_offer(offers: Sequence[Offer], mfu: float) -> Offer:
    """Chooses the offer with the most operations per dollar; the first of equals.

    Args:
      offers: at least one; if there are more, all have a price.
      mfu: the share of the peak that all of them reach, in (0, 1].

    Raises:
      ValueError: one of several has no price.
    """
    if len(offers) == 1:
        return offers[0]
    return max(offers, key=lambda offer: offer.flops_per_usd(mfu))
