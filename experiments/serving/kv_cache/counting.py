"""Operations of drawing a token with and without kept keys and values, counted.

Without, the whole prefix of t tokens goes through the model for every token; with, the
last one alone, which meets the keys of all t. Both are polynomials in t: what a token
costs, and, summed, what a text costs.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from scaling.costs import flops
from scaling.shapes import Description


class Polynomial(NamedTuple):
    """Operations of one token behind others: constant + linear t + square t^2."""

    constant: int
    linear: int
    square: int

    def at(self, length: int) -> int:
        """Operations of the token drawn from `length` tokens."""
        return self.constant + self.linear * length + self.square * length**2

    def total(self, length: int) -> int:
        """Operations of all tokens drawn from 1, 2, ... up to `length` tokens."""
        n = length
        squares = n * (n + 1) * (2 * n + 1) // 6
        return (
            self.constant * n + self.linear * n * (n + 1) // 2 + self.square * squares
        )


class Way(NamedTuple):
    """Operations of one way to draw tokens."""

    everything: Polynomial
    attention: Polynomial
    """Scores and values alone."""


class Counted(NamedTuple):
    """Operations by length, without a cache and with one: [2, lengths]."""

    name: str
    length: Int[np.ndarray, " lengths"]
    token_flops: Float[np.ndarray, "2 lengths"]
    total_flops: Float[np.ndarray, "2 lengths"]
    attention_flops: Float[np.ndarray, "2 lengths"]
    """The part of the total that scores and values take."""


def without_cache(model: Description) -> Way:
    """Feeds the whole prefix for each token, and wants the logits of the last.

    Pairs of query and key are counted as causal attention needs them.
    """

    def terms(length: int) -> tuple[flops.Term, ...]:
        return flops.forward(model, sequence=length, attention="causal", logits="last")

    return _through(terms)


def with_cache(model: Description) -> Way:
    """Feeds one token, which meets the keys of all."""
    return _through(lambda length: flops.decode(model, context=length))


def count(model: Description, lengths: tuple[int, ...]) -> Counted:
    """Counts both ways at some lengths.

    Args:
      model: its shape; no layer may have a window.
      lengths: tokens, at least 1.

    Raises:
      ValueError: a layer has a window, so that the counts are no polynomials.
    """
    if any(model.windows):
        raise ValueError(f"{model.name}: layers with windows forget what is behind")
    ways = without_cache(model), with_cache(model)

    def table(values: list[list[int]]) -> np.ndarray:
        return np.array(values, float)

    return Counted(
        model.name,
        np.array(lengths),
        table([[way.everything.at(n) for n in lengths] for way in ways]),
        table([[way.everything.total(n) for n in lengths] for way in ways]),
        table([[way.attention.total(n) for n in lengths] for way in ways]),
    )


def exponents(values: Float[np.ndarray, "ways n"], length: np.ndarray) -> np.ndarray:
    """Powers of the length by which values grow between the last two lengths."""
    steps = np.diff(np.log(values[:, -2:]), axis=1)[:, 0]
    return steps / np.diff(np.log(length[-2:].astype(float)))


def _through(terms: Callable[[int], tuple[flops.Term, ...]]) -> Way:
    """Finds the polynomials through the counts at 1, 2 and 3 tokens."""
    found = [terms(length) for length in (1, 2, 3)]
    attention = [[x for x in each if x.growth == "s^2"] for each in found]
    return Way(
        _polynomial([flops.total(each) for each in found]),
        _polynomial([flops.total(tuple(each)) for each in attention]),
    )


def _polynomial(values: list[int]) -> Polynomial:
    one, two, three = values
    square = (three - 2 * two + one) // 2
    linear = two - one - 3 * square
    return Polynomial(one - linear - square, linear, square)
