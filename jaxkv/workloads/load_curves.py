"""Latency against request rate, and the highest rate that a system sustains.

A system serves the same `Load` at several rates. The mean latencies form a
`LatencyCurve`; `sustained_rate` interpolates the rate at which it crosses a bound.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv.workloads.arrivals import Workload, make
from jaxkv.workloads.lengths import Lengths, Pair


class Load(NamedTuple):
    """The same requests for every rate, which says only how fast they come.

    Attributes:
      gaps_s: cumulated gaps between requests at 1 request a second.
      tokens: their lengths.
      seconds: in which they come.
    """

    gaps_s: Float[np.ndarray, " requests"]
    tokens: Lengths
    seconds: float

    def at(self, rate: int | float, samples: int = 1) -> Workload:
        """Those that come within the time, of some sequences each."""
        arrival_s = self.gaps_s / rate
        num = max(1, int(np.searchsorted(arrival_s, self.seconds)))
        prompt, output = (x[:num] for x in self.tokens)
        return make(arrival_s[:num], prompt, output, samples=samples)

    def repeated(self, rate: int | float, samples: int) -> Workload:
        """The same with every sequence a request of its own, which shares nothing."""
        one = self.at(rate)
        return jax.tree.map(
            lambda x: jnp.repeat(x, samples, axis=0) if x.ndim else x, one
        )


def num_requests_for(
    rate: int | float, seconds: int | float, *, deviations: int | float = 6.0
) -> int:
    """Requests that last so many seconds at a rate, but for a small chance.

    It is that of so many deviations of their number, which is Poisson's.
    """
    mean = rate * seconds
    return math.ceil(mean + deviations * math.sqrt(mean) + 1)


def draw_load(
    law: Pair, most_per_s: int | float, seconds: int | float, seed: int
) -> Load:
    """Draws requests for all rates up to `most_per_s`, a second."""
    rng = np.random.default_rng(seed)
    num = num_requests_for(most_per_s, seconds)
    return Load(np.cumsum(rng.exponential(1.0, num)), law.draw(rng, num), seconds)


class LatencyCurve(NamedTuple):
    """A system's latency, rate by rate.

    Attributes:
      rates: requests a second, ascending.
      latency: normalised, seconds a token.
    """

    rates: Float[np.ndarray, " rates"]
    latency: Float[np.ndarray, " rates"]


class SustainedRate(NamedTuple):
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


def sustained_rate(curve: LatencyCurve, bound: int | float) -> SustainedRate:
    """Finds the rate at which the latency first passes a bound, in seconds a token.

    Between two rates its logarithm is taken to be straight.
    """
    rates, latency = curve
    over = np.flatnonzero(latency > bound)
    if not over.size:
        return SustainedRate(float(rates[-1]), "at least")
    k = int(over[0])
    if k == 0:
        return SustainedRate(float(rates[0]), "below")
    low, high = math.log(latency[k - 1]), math.log(latency[k])
    part = (math.log(bound) - low) / (high - low)
    return SustainedRate(float(rates[k - 1] + part * (rates[k] - rates[k - 1])), "is")


def load_ratio(first: LatencyCurve, second: LatencyCurve, bound: int | float) -> float:
    """How many times the load of the second the first sustains; NaN if unknown."""
    one, two = sustained_rate(first, bound), sustained_rate(second, bound)
    return one.rate / two.rate if one.relation == two.relation == "is" else math.nan


def load_ratios(
    first: LatencyCurve,
    second: LatencyCurve,
    bounds: tuple[int | float, int | float],
    num: int = 9,
) -> Float[np.ndarray, " bounds"]:
    """The ratios at `num` bounds in an interval, those that both pass."""
    found = np.array([load_ratio(first, second, x) for x in np.linspace(*bounds, num)])
    return found[~np.isnan(found)]


def choose_rates(
    curve: LatencyCurve, bounds: tuple[int | float, int | float], num: int
) -> Float[np.ndarray, " num"]:
    """Chooses more rates where the latency passes two bounds.

    Args:
      curve: what was tried, at least one rate of which was too much.
      bounds: the lower and the upper, seconds a token.
      num: rates to choose.

    Returns:
      Evenly spaced ones between the last rate below both bounds, or 0, and the first
      above.
    """
    rates, latency = curve
    first, last = (np.flatnonzero(latency > bound)[0] for bound in bounds)
    low = rates[first - 1] if first else 0.0
    return low + (rates[last] - low) * np.arange(1, num + 1) / (num + 1)
