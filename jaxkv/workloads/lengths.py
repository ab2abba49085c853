"""Distributions of prompt and output lengths, in tokens.

Distributions are plain values; samples are drawn by NumPy on the host, and depend only
on the state of the generator.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import validation
from jaxkv.validation import ConfigRecord, Range

MAX_TOKEN_COUNT = 2**29
"""Longest prompt or output in tokens, so that their sum is an int32."""
_NUM_REFERENCE = 2**18
"""Size of the reference sample of a distribution; its means have an error of 0.2 %."""
_SCALE_ITERATIONS = 60


class Lengths(NamedTuple):
    """Prompt and output lengths of requests, in tokens."""

    prompt: Int[np.ndarray, " requests"]
    """At least 1."""
    output: Int[np.ndarray, " requests"]
    """At least 1."""


def _check_mean(mean: float) -> None:
    hint = f"in [1, {MAX_TOKEN_COUNT}]"
    validation.number("mean", mean, low=1.0, high=MAX_TOKEN_COUNT, hint=hint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """A constant length."""

    tokens: int
    """Length in [1, `MAX_TOKEN_COUNT`]."""

    def __post_init__(self) -> None:
        """Validates the field."""
        hint = f"in [1, {MAX_TOKEN_COUNT}], whole"
        tokens = self.tokens
        below = MAX_TOKEN_COUNT + 1
        validation.integer("tokens", tokens, low=1, below=below, hint=hint)

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return float(self.tokens)

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Returns `num` equal lengths."""
        return np.full(num, float(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Uniform distribution over the integers in [low, high]."""

    low: int
    """Smallest length, at least 1."""
    high: int
    """Largest length, inclusive."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        for name in ("low", "high"):
            validation.integer(name, getattr(self, name))
        if not 1 <= self.low <= self.high <= MAX_TOKEN_COUNT:
            raise ValueError(
                f"low, high={(self.low, self.high)} must be in order, from 1"
            )

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Draws integer lengths."""
        return rng.integers(self.low, self.high + 1, num).astype(float)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogNormal:
    """Log-normal distribution."""

    mean: float
    """Mean length in tokens, at least 1."""
    sigma: float
    """Standard deviation of the natural logarithm, at least 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _check_mean(self.mean)
        largest = sys.float_info.max
        sigma = self.sigma
        hint = "at least 0"
        validation.number("sigma", sigma, low=0.0, high=largest, hint=hint)

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Draws lengths that are not rounded yet."""
        middle = math.log(self.mean) - self.sigma**2 / 2
        return rng.lognormal(middle, self.sigma, num)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gamma:
    """Gamma distribution; shape 1 is exponential."""

    mean: float
    """Mean length in tokens, at least 1."""
    shape: float
    """Shape parameter, 1 / (coefficient of variation)^2, above 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _check_mean(self.mean)
        low = math.ulp(0.0)
        high = sys.float_info.max
        validation.number("shape", self.shape, low=low, high=high, hint="above 0")

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Draws lengths that are not rounded yet."""
        return rng.gamma(self.shape, self.mean / self.shape, num)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram:
    """Bars of equal width, uniform within a bar, as publications draw lengths."""

    first: float
    """Lower edge of the first bar in tokens, at least 1."""
    width: float
    """Width of a bar in tokens, above 0."""
    counts: tuple[int, ...]
    """Requests in each bar, or a number in proportion; at least one above 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        high = float(MAX_TOKEN_COUNT)
        hint = f"in [1, {MAX_TOKEN_COUNT}]"
        validation.number("first", self.first, low=1.0, high=high, hint=hint)
        least = math.ulp(0.0)
        validation.number("width", self.width, low=least, high=high, hint="above 0")
        for count in self.counts:
            validation.integer("counts", count, low=0, hint="at least 0")
        if not any(self.counts):
            raise ValueError(f"counts={self.counts} must have one above 0")

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        middles = self.first + self.width * (np.arange(len(self.counts)) + 0.5)
        return float(np.average(middles, weights=self.counts))

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Draws lengths that are not rounded yet."""
        shares = np.array(self.counts) / sum(self.counts)
        bars = rng.choice(len(shares), num, p=shares)
        return self.first + self.width * (bars + rng.random(num))


type LengthDistribution = Fixed | Uniform | LogNormal | Gamma | Histogram


class Pair(ConfigRecord):
    """Independent prompt and output lengths, conditioned on joint bounds.

    Pairs outside the bounds are rejected and drawn again. That would lower the means,
    so with `keeps_means` both distributions are scaled until the accepted pairs have
    the means of the fields.
    """

    prompt: LengthDistribution
    """Distribution of the prompt length."""
    output: LengthDistribution
    """Distribution of the output length."""
    max_prompt: Annotated[int, Range(1, MAX_TOKEN_COUNT)] = MAX_TOKEN_COUNT
    """Largest prompt length."""
    max_length: Annotated[int, Range(2, 2 * MAX_TOKEN_COUNT)] = 2 * MAX_TOKEN_COUNT
    """Largest sum of prompt and output length."""
    keeps_means: bool = False
    """True if the accepted pairs have the means of `prompt` and `output`."""

    def draw(self, rng: np.random.Generator, num: int) -> Lengths:
        """Draws the lengths of requests.

        Args:
          rng: random generator.
          num: requests, at least 1.

        Raises:
          ValueError: `rng` is no generator; `num` is below 1; or the bounds reject more
            than 99 % of pairs, or, with `keeps_means`, no scale gives these means.
        """
        validation.instance("rng", rng, np.random.Generator)
        num = validation.integer("num", num, low=1)
        stretch = _scale_factors(self)
        prompt = np.empty(0, np.int64)
        output = np.empty(0, np.int64)
        num_drawn = 0
        while prompt.size < num:
            lengths = _draw(self, rng, 2 * num + 100) * stretch
            num_drawn += len(lengths)
            tokens = np.maximum(lengths.round(), 1).astype(np.int64)
            tokens = tokens[_within_bounds(self, tokens)]
            prompt = np.concatenate([prompt, tokens[:, 0]])
            output = np.concatenate([output, tokens[:, 1]])
            if prompt.size < num_drawn / 100:
                raise ValueError(f"more than 99 % of pairs exceed the bounds of {self}")
        return Lengths(prompt[:num].astype(np.int32), output[:num].astype(np.int32))


SHAREGPT = Pair(
    prompt=Gamma(mean=161.31, shape=0.45),
    output=Gamma(mean=337.99, shape=1.30),
    max_prompt=1024,
    max_length=2048,
    keeps_means=True,
)
"""Conversations of users with a chat service.

The means are published. The shape of the outputs follows from figure 2: Orca (Max) runs
7 requests and has reserved 13.3 % of 15,728 token places for future tokens, 299 tokens
each; a request is observed in proportion to its length, so E[O^2] / 2 E[O] = 299. The
shape of the prompts is an assumption.

Source: Kwon et al. 2023, arXiv:2309.06180, section 6.1 and figure 2."""
ALPACA = Pair(
    prompt=Gamma(mean=19.31, shape=3.0),
    output=Gamma(mean=58.45, shape=0.9),
    max_prompt=1024,
    max_length=2048,
    keeps_means=True,
)
"""Instructions. The means are published; the shapes are assumptions.

Source: Kwon et al. 2023, arXiv:2309.06180, section 6.1."""
ORCA = Pair(prompt=Uniform(low=32, high=512), output=Uniform(low=1, high=128))
"""Source: Yu et al. 2022 (Orca), section 6.2."""


@validation.checks_numbers()
def rescale_to_means(
    unit: Float[np.ndarray, "num kinds"],
    means: Float[np.ndarray, " kinds"],
    fits: Callable[[Float[np.ndarray, "num kinds"]], Bool[np.ndarray, " num"]],
    *,
    num_rounds: int = _SCALE_ITERATIONS,
) -> Float[np.ndarray, " kinds"] | None:
    """Finds factors with which the accepted samples have given means.

    Args:
      unit: samples before scaling.
      means: target means of the accepted samples, after scaling.
      fits: marks the accepted samples, after scaling.
      num_rounds: largest number of fixed-point iterations.

    Returns:
      The factors; None if an iteration accepts no sample.
    """
    scale = means / unit.mean(0)
    for _ in range(num_rounds):
        mask = fits(unit * scale)
        if not mask.any():
            return None
        before = scale
        scale = means / unit[mask].mean(0)
        if np.allclose(before, scale, rtol=1e-9, atol=0):
            break
    return scale


def _draw(pair: Pair, rng: np.random.Generator, num: int) -> Float[np.ndarray, "n 2"]:
    """Draws pairs without regard to the bounds."""
    return np.stack([law.draw(rng, num) for law in (pair.prompt, pair.output)], axis=1)


def _within_bounds(pair: Pair, tokens: np.ndarray) -> Bool[np.ndarray, " n"]:
    """Marks the pairs within the bounds."""
    within = tokens[:, 0] <= pair.max_prompt
    within &= tokens[:, 1] <= MAX_TOKEN_COUNT
    return within & (tokens.sum(1) <= pair.max_length)


@functools.cache
def _scale_factors(pair: Pair) -> Float[np.ndarray, " 2"]:
    """Returns the factors of a pair's distributions, from a fixed reference sample."""
    if not pair.keeps_means:
        return np.ones(2)
    unit = _draw(pair, np.random.default_rng(0), _NUM_REFERENCE)
    means = np.array([pair.prompt.mean, pair.output.mean])
    unit *= means / unit.mean(0)  # factors are 1 if no pair is rejected
    factors = rescale_to_means(
        unit, means, lambda lengths: _within_bounds(pair, lengths)
    )
    if factors is not None:
        rows = unit[_within_bounds(pair, unit * factors)] * factors
        if rows.size and np.allclose(rows.mean(0), means, rtol=0.01):
            return factors
    raise ValueError(f"no scale gives the means of {pair} within its bounds")
