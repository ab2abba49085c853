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

from jaxkv import validation
from jaxkv.workloads.arrivals import Workload, make_workload
from jaxkv.workloads.lengths import Lengths, Pair


class Load(NamedTuple):
    """Requests that arrive at any given rate.

    Attributes:
      gaps_s: arrival times at 1 request per second.
      tokens: lengths of the requests.
      seconds: duration in s.
    """

    gaps_s: Float[np.ndarray, " requests"]
    tokens: Lengths
    seconds: float

    def at(self, rate: int | float, samples: int = 1) -> Workload:
        """Returns the requests that arrive within `seconds` at a rate."""
        arrival_s = self.gaps_s / rate
        num = max(1, int(np.searchsorted(arrival_s, self.seconds)))
        prompt, output = (x[:num] for x in self.tokens)
        return make_workload(arrival_s[:num], prompt, output, samples=samples)

    def repeated(self, rate: int | float, samples: int) -> Workload:
        """Returns the same load with every sequence as a request of its own."""
        one = self.at(rate)
        return jax.tree.map(
            lambda x: jnp.repeat(x, samples, axis=0) if x.ndim else x, one
        )


@validation.checks_numbers(
    rate="[0, 1e9]", seconds=validation.SECONDS, deviations="[0, 100]"
)
def num_requests_for(
    rate: int | float, seconds: int | float, *, deviations: int | float = 6.0
) -> int:
    """Returns a number of requests that lasts for `seconds` with high probability.

    It is the mean plus `deviations` standard deviations of a Poisson distribution.
    """
    mean = rate * seconds
    return math.ceil(mean + deviations * math.sqrt(mean) + 1)


@validation.checks_numbers(
    most_per_s="[0, 1e9]", seconds=validation.SECONDS, seed=validation.SEEDS
)
def draw_load(
    pair: Pair, most_per_s: int | float, seconds: int | float, seed: int
) -> Load:
    """Draws requests for all rates up to `most_per_s` requests per second."""
    rng = np.random.default_rng(seed)
    num = num_requests_for(most_per_s, seconds)
    return Load(np.cumsum(rng.exponential(1.0, num)), pair.draw(rng, num), seconds)


class LatencyCurve(NamedTuple):
    """Latency of a system at each request rate.

    Attributes:
      rates: requests per second, ascending.
      latency: normalised latency in s per token.
    """

    rates: Float[np.ndarray, " rates"]
    latency: Float[np.ndarray, " rates"]


class SustainedRate(NamedTuple):
    """A sustained request rate, or a bound on it.

    Attributes:
      rate: requests per second.
      relation: "is"; "at least" if no measured rate exceeded the bound; or "below" if
        all did.
    """

    rate: float
    relation: str

    @property
    def text(self) -> str:
        """The rate as a table shows it."""
        sign = {"is": "", "at least": "> ", "below": "< "}[self.relation]
        return f"{sign}{self.rate:.3g}"


@validation.checks_numbers(bound=0)
def sustained_rate(curve: LatencyCurve, bound: int | float) -> SustainedRate:
    """Returns the rate at which the latency first exceeds a bound, in s per token.

    The logarithm of the latency is interpolated linearly between two rates.
    """
    rates, latency = curve
    over = np.flatnonzero(latency > bound)
    if not over.size:
        return SustainedRate(float(rates[-1]), "at least")
    k = int(over[0])
    if k == 0:
        return SustainedRate(float(rates[0]), "below")
    low = math.log(latency[k - 1])
    high = math.log(latency[k])
    part = (math.log(bound) - low) / (high - low)
    return SustainedRate(float(rates[k - 1] + part * (rates[k] - rates[k - 1])), "is")


@validation.checks_numbers(bound=0)
def load_ratio(first: LatencyCurve, second: LatencyCurve, bound: int | float) -> float:
    """Returns the ratio of the sustained rates of two systems; NaN if unknown."""
    one = sustained_rate(first, bound)
    two = sustained_rate(second, bound)
    return one.rate / two.rate if one.relation == two.relation == "is" else math.nan


@validation.checks_numbers()
def load_ratios(
    first: LatencyCurve,
    second: LatencyCurve,
    bounds: tuple[int | float, int | float],
    num: int = 9,
) -> Float[np.ndarray, " bounds"]:
    """Returns the known ratios at `num` bounds in an interval."""
    ratios = np.array([load_ratio(first, second, x) for x in np.linspace(*bounds, num)])
    return ratios[~np.isnan(ratios)]


@validation.checks_numbers()
def choose_rates(
    curve: LatencyCurve, bounds: tuple[int | float, int | float], num: int
) -> Float[np.ndarray, " num"]:
    """Chooses further rates where the latency exceeds two bounds.

    Args:
      curve: latencies measured so far; at least one exceeds both bounds.
      bounds: lower and upper bound in s per token.
      num: rates to choose.

    Returns:
      Evenly spaced rates between the last rate below both bounds, or 0, and the first
      rate above both.
    """
    rates, latency = curve
    first, last = (np.flatnonzero(latency > bound)[0] for bound in bounds)
    low = rates[first - 1] if first else 0.0
    return low + (rates[last] - low) * np.arange(1, num + 1) / (num + 1)
