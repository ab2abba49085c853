"""The same requests at every rate, and the rate that a system sustains.

A system serves a `Load` at several rates; the latencies make a `Curve`, of which `at`
reads off how much load it sustains within a bound.
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


def enough(
    rate: int | float, seconds: int | float, *, deviations: int | float = 6.0
) -> int:
    """Requests that last so many seconds at a rate, but for a small chance.

    It is that of so many deviations of their number, which is Poisson's.
    """
    mean = rate * seconds
    return math.ceil(mean + deviations * math.sqrt(mean) + 1)


def load(law: Pair, most_per_s: int | float, seconds: int | float, seed: int) -> Load:
    """Draws requests for all rates up to `most_per_s`, a second."""
    rng = np.random.default_rng(seed)
    num = enough(most_per_s, seconds)
    return Load(np.cumsum(rng.exponential(1.0, num)), law.draw(rng, num), seconds)


class Curve(NamedTuple):
    """A system's latency, rate by rate.

    Attributes:
      rates: requests a second, ascending.
      latency: normalised, seconds a token.
    """

    rates: Float[np.ndarray, " rates"]
    latency: Float[np.ndarray, " rates"]


class Sustained(NamedTuple):
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


def at(curve: Curve, bound: int | float) -> Sustained:
    """Finds the rate at which the latency first passes a bound, in seconds a token.

    Between two rates its logarithm is taken to be straight.
    """
    rates, latency = curve
    over = np.flatnonzero(latency > bound)
    if not over.size:
        return Sustained(float(rates[-1]), "at least")
    k = int(over[0])
    if k == 0:
        return Sustained(float(rates[0]), "below")
    low, high = math.log(latency[k - 1]), math.log(latency[k])
    part = (math.log(bound) - low) / (high - low)
    return Sustained(float(rates[k - 1] + part * (rates[k] - rates[k - 1])), "is")


def ratio(first: Curve, second: Curve, bound: int | float) -> float:
    """How many times the load of the second the first sustains; NaN if unknown."""
    one, two = at(first, bound), at(second, bound)
    return one.rate / two.rate if one.relation == two.relation == "is" else math.nan


def ratios(
    first: Curve, second: Curve, bounds: tuple[int | float, int | float], num: int = 9
) -> Float[np.ndarray, " bounds"]:
    """The ratios at `num` bounds in an interval, those that both pass."""
    found = np.array([ratio(first, second, x) for x in np.linspace(*bounds, num)])
    return found[~np.isnan(found)]


def between(
    curve: Curve, bounds: tuple[int | float, int | float], num: int
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
