"""How long prompts and outputs are: laws of one length, and of pairs.

Laws are plain values, draws are NumPy's, on the host; the same generator in the same
state gives the same lengths.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import validation

LONGEST = 2**29
"""Tokens of a prompt or an output at most, so that their sum is an int32."""
_NUM_REFERENCE = 2**18
"""Pairs that stand for a law: their means are good to about 0.2 %."""
_NUM_ROUNDS = 60


class Lengths(NamedTuple):
    """Tokens of some requests."""

    prompt: Int[np.ndarray, " requests"]
    """At least 1."""
    output: Int[np.ndarray, " requests"]
    """At least 1."""


def _check_mean(mean: float) -> None:
    hint = f"in [1, {LONGEST}]"
    validation.number("mean", mean, low=1.0, high=LONGEST, hint=hint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """Always the same."""

    tokens: int
    """How many, in [1, `LONGEST`]."""

    def __post_init__(self) -> None:
        """Refuses what no request has."""
        hint = f"in [1, {LONGEST}], whole"
        tokens, below = self.tokens, LONGEST + 1
        validation.integer("tokens", tokens, low=1, below=below, hint=hint)

    @property
    def mean(self) -> float:
        """Tokens on average."""
        return float(self.tokens)

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Repeats the length."""
        return np.full(num, float(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every whole number from the lowest to the highest, alike."""

    low: int
    """The lowest, at least 1."""
    high: int
    """The highest, itself among them."""

    def __post_init__(self) -> None:
        """Refuses an empty range."""
        for name in ("low", "high"):
            validation.integer(name, getattr(self, name))
        if not 1 <= self.low <= self.high <= LONGEST:
            raise ValueError(
                f"low, high={(self.low, self.high)} must be in order, from 1"
            )

    @property
    def mean(self) -> float:
        """Tokens on average."""
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Draws whole numbers."""
        return rng.integers(self.low, self.high + 1, num).astype(float)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogNormal:
    """The logarithm is normal."""

    mean: float
    """Tokens on average, at least 1."""
    sigma: float
    """Standard deviation of the natural logarithm, at least 0."""

    def __post_init__(self) -> None:
        """Refuses what is no law."""
        _check_mean(self.mean)
        largest = sys.float_info.max
        sigma, hint = self.sigma, "at least 0"
        validation.number("sigma", sigma, low=0.0, high=largest, hint=hint)

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Draws lengths that are not yet rounded."""
        middle = math.log(self.mean) - self.sigma**2 / 2
        return rng.lognormal(middle, self.sigma, num)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gamma:
    """A Gamma law; of shape 1 it is exponential."""

    mean: float
    """Tokens on average, at least 1."""
    shape: float
    """1 / the squared coefficient of variation, above 0."""

    def __post_init__(self) -> None:
        """Refuses what is no law."""
        _check_mean(self.mean)
        low, high = math.ulp(0.0), sys.float_info.max
        validation.number("shape", self.shape, low=low, high=high, hint="above 0")

    def draw(self, rng: np.random.Generator, num: int) -> Float[np.ndarray, " num"]:
        """Draws lengths that are not yet rounded."""
        return rng.gamma(self.shape, self.mean / self.shape, num)


type LengthDistribution = Fixed | Uniform | LogNormal | Gamma


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Prompts and outputs, independent but for bounds that both keep together.

    A pair out of bounds is drawn anew. That would lower the means, so where
    `keeps_means` both laws are stretched until what is left has the means they name.
    """

    prompt: LengthDistribution
    """Of the prompt's tokens."""
    output: LengthDistribution
    """Of the output's."""
    max_prompt: int = LONGEST
    """Tokens of a prompt at most."""
    max_length: int = 2 * LONGEST
    """Tokens of prompt and output at most."""
    keeps_means: bool = False
    """Whether the means are those of what the bounds leave."""

    def __post_init__(self) -> None:
        """Refuses bounds that leave nothing."""
        validation.within(self, "max_prompt", low=1, high=LONGEST)
        validation.within(self, "max_length", low=2, high=2 * LONGEST)

    def draw(self, rng: np.random.Generator, num: int) -> Lengths:
        """Draws the lengths of some requests.

        Args:
          rng: where the draws come from.
          num: how many, at least 1.

        Raises:
          ValueError: `num` is below 1; or the bounds leave less than a hundredth, or,
            under `keeps_means`, no law with these means.
        """
        num = validation.integer("num", num, low=1)
        stretch = _stretch(self)
        prompt, output = np.empty(0, np.int64), np.empty(0, np.int64)
        drawn = 0
        while prompt.size < num:
            lengths = _draw(self, rng, 2 * num + 100) * stretch
            drawn += len(lengths)
            tokens = np.maximum(lengths.round(), 1).astype(np.int64)
            tokens = tokens[_fits(self, tokens)]
            prompt = np.concatenate([prompt, tokens[:, 0]])
            output = np.concatenate([output, tokens[:, 1]])
            if prompt.size < drawn / 100:
                raise ValueError(f"hardly any pair keeps the bounds of {self}")
        return Lengths(prompt[:num].astype(np.int32), output[:num].astype(np.int32))


SHAREGPT = Pair(
    prompt=Gamma(mean=161.31, shape=0.45),
    output=Gamma(mean=337.99, shape=1.30),
    max_prompt=1024,
    max_length=2048,
    keeps_means=True,
)
"""Conversations of people with a chat service.

The means are printed. The outputs' shape follows from figure 2: Orca (Max) runs 7
requests and has reserved 13.3 % of 15,728 token places for what is still to come, 299
tokens each; a request is seen in proportion to its length, so E[O^2] / 2 E[O] = 299.
The prompts' shape is our choice.

Source: Kwon et al. 2023, arXiv:2309.06180, section 6.1 and figure 2.
"""
ALPACA = Pair(
    prompt=Gamma(mean=19.31, shape=3.0),
    output=Gamma(mean=58.45, shape=0.9),
    max_prompt=1024,
    max_length=2048,
    keeps_means=True,
)
"""Instructions. The means are printed; the shapes are our choice.

Source: Kwon et al. 2023, arXiv:2309.06180, section 6.1.
"""
ORCA = Pair(prompt=Uniform(low=32, high=512), output=Uniform(low=1, high=128))
"""Source: Yu et al. 2022 (Orca), section 6.2."""


def rescale_to_means(
    unit: Float[np.ndarray, "num kinds"],
    means: Float[np.ndarray, " kinds"],
    fits: Callable[[Float[np.ndarray, "num kinds"]], Bool[np.ndarray, " num"]],
    *,
    num_rounds: int = _NUM_ROUNDS,
) -> Float[np.ndarray, " kinds"] | None:
    """Finds factors under which those of some draws that fit have given means.

    Args:
      unit: draws.
      means: what those that fit shall have, once multiplied.
      fits: tells which do, multiplied.
      num_rounds: rounds of the fixed point at most.

    Returns:
      The factors; None if nothing fits any more on the way.
    """
    scale = means / unit.mean(0)
    for _ in range(num_rounds):
        kept = fits(unit * scale)
        if not kept.any():
            return None
        before, scale = scale, means / unit[kept].mean(0)
        if np.allclose(before, scale, rtol=1e-9, atol=0):
            break
    return scale


def _draw(pair: Pair, rng: np.random.Generator, num: int) -> Float[np.ndarray, "n 2"]:
    """Draws pairs regardless of the bounds."""
    return np.stack([law.draw(rng, num) for law in (pair.prompt, pair.output)], axis=1)


def _fits(pair: Pair, tokens: np.ndarray) -> Bool[np.ndarray, " n"]:
    """Tells which pairs keep the bounds."""
    within = tokens[:, 0] <= pair.max_prompt
    within &= tokens[:, 1] <= LONGEST
    return within & (tokens.sum(1) <= pair.max_length)


@functools.cache
def _stretch(pair: Pair) -> Float[np.ndarray, " 2"]:
    """Factors of a pair's laws, from a reference sample that is always the same."""
    if not pair.keeps_means:
        return np.ones(2)
    unit = _draw(pair, np.random.default_rng(0), _NUM_REFERENCE)
    means = np.array([pair.prompt.mean, pair.output.mean])
    unit *= means / unit.mean(0)  # bounds that cut nothing off then stretch nothing
    found = rescale_to_means(unit, means, lambda lengths: _fits(pair, lengths))
    if found is not None:
        kept = unit[_fits(pair, unit * found)] * found
        if kept.size and np.allclose(kept.mean(0), means, rtol=0.01):
            return found
    raise ValueError(f"no law has the means of {pair} within its bounds")
