"""How much load a system bears: the rate at which its latency reaches a bound."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.serving.latency_vs_rate.panels import PANELS

BOUNDS = (0.1, 0.9)
"""Normalised latencies between which published curves were compared, s a token."""
BOUND = 0.5
"""Where one number has to do."""


class Curve(NamedTuple):
    """What became of one system's requests, rate by rate.

    Attributes:
      rates: requests a second, rising.
      latency: normalised, seconds a token.
    """

    rates: Float[np.ndarray, " rates"]
    latency: Float[np.ndarray, " rates"]


class Capacity(NamedTuple):
    """A rate, and how well it is known.

    Attributes:
      rate: requests a second.
      relation: "is"; "at least", as no rate that was tried was too much; or "below",
        as all were.
    """

    rate: float
    relation: str

    @property
    def text(self) -> str:
        """As a table has it."""
        sign = {"is": "", "at least": "> ", "below": "< "}[self.relation]
        return f"{sign}{self.rate:.3g}"


def curve(rows: list[dict[str, Any]], system: str) -> Curve:
    """Puts the rows of a system in order."""
    here = sorted(
        (x["rate_per_s"], x["normalised_s"]) for x in rows if x["system"] == system
    )
    return Curve(*np.array(here, float).reshape(-1, 2).T)


def curves(rows: list[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Finds the curves of every panel by system."""
    found = {}
    for panel in dict.fromkeys(x["panel"] for x in rows if x["panel"] in PANELS):
        here = [x for x in rows if x["panel"] == panel]
        names = dict.fromkeys(x["system"] for x in here)
        found[panel] = {name: curve(here, name) for name in names}
    return found


def ends(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Picks the rows at the published axes' ends."""
    return [
        x
        for x in rows
        if x["panel"] in PANELS
        and not x["turn"]
        and math.isclose(x["rate_per_s"], PANELS[x["panel"]].axis)
    ]


def at(curve: Curve, bound: float = BOUND) -> Capacity:
    """Finds the rate at which the latency first passes a bound.

    Between two rates its logarithm is taken to be straight.
    """
    rates, latency = curve
    over = np.flatnonzero(latency > bound)
    if not over.size:
        return Capacity(float(rates[-1]), "at least")
    k = int(over[0])
    if k == 0:
        return Capacity(float(rates[0]), "below")
    low, high = math.log(latency[k - 1]), math.log(latency[k])
    part = (math.log(bound) - low) / (high - low)
    return Capacity(float(rates[k - 1] + part * (rates[k] - rates[k - 1])), "is")


def bears_all(curve: Curve) -> bool:
    """Tells whether no rate that was tried was too much."""
    return bool((curve.latency <= BOUNDS[1]).all())


def between(curve: Curve, num: int) -> Float[np.ndarray, " num"]:
    """Chooses more rates where the latency passes the bounds.

    Args:
      curve: what was tried, at least one rate of which was too much.
      num: rates to choose.

    Returns:
      Evenly spaced ones between the last rate below both bounds, or 0, and the first
      above.
    """
    rates, latency = curve
    first, last = (np.flatnonzero(latency > bound)[0] for bound in BOUNDS)
    low = rates[first - 1] if first else 0.0
    return low + (rates[last] - low) * np.arange(1, num + 1) / (num + 1)


def ratios(first: Curve, second: Curve) -> Float[np.ndarray, " bounds"]:
    """Divides what two systems bear, at bounds from 0.1 to 0.9 s a token.

    Returns:
      The ratios at those bounds that both pass.
    """
    found = []
    for bound in np.linspace(*BOUNDS, 9):
        one, two = at(first, bound), at(second, bound)
        if one.relation == two.relation == "is":
            found.append(one.rate / two.rate)
    return np.array(found)
