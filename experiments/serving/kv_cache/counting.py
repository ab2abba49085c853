"""Operations of drawing a token with and without kept keys and values, counted.

Without, the whole prefix of t tokens goes through the model for every token; with, the
last one alone, which meets the keys of all t. Both are polynomials in t: what a token
costs, and, summed, what a text costs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments.framework import Record, column, table
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
        first = length * (length + 1) // 2
        squares = first * (2 * length + 1) // 3
        return self.constant * length + self.linear * first + self.square * squares


type PolynomialPair = tuple[Polynomial, Polynomial]
"""One way to draw tokens: all operations, and those of scores and values alone."""
FLOPS = ("without_flops", "with_flops", "text_without_flops", "text_with_flops")
"""Of a token and of a text, as metrics have them."""


class FlopCounts(Record):
    """Operations by length, without a cache and with one."""

    name: str = column("of the model")
    length: Int[np.ndarray, " lengths"] = column("tokens")
    token_flops: Float[np.ndarray, "2 lengths"] = column("of the token behind them")
    total_flops: Float[np.ndarray, "2 lengths"] = column("of all tokens up to it")
    attention_flops: Float[np.ndarray, "2 lengths"] = column(
        "the part of the total that scores and values take"
    )

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of every length, for JSON."""
        totals = self.total_flops
        columns = zip(FLOPS, (*self.token_flops, *totals), strict=True)
        ratio = {"text_ratio": totals[0] / totals[1]}
        return table.by_row({"tokens": self.length} | dict(columns) | ratio)


def without_cache(model: Description) -> PolynomialPair:
    """Feeds the whole prefix for each token, and wants the logits of the last.

    Pairs of query and key are counted as causal attention needs them.
    """
    how: dict[str, Any] = {"attention": "causal", "logits": "last"}
    return _through(lambda length: flops.forward(model, sequence=length, **how))


def with_cache(model: Description) -> PolynomialPair:
    """Feeds one token, which meets the keys of all."""
    return _through(lambda length: flops.decode(model, context=length))


def count_flops(model: Description, lengths: tuple[int, ...]) -> FlopCounts:
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
    counts = (
        [[each.at(n) for n in lengths] for each, _ in ways],
        [[each.total(n) for n in lengths] for each, _ in ways],
        [[attention.total(n) for n in lengths] for _, attention in ways],
    )
    return FlopCounts(
        model.name, np.array(lengths), *(np.array(x, float) for x in counts)
    )


def growth_exponents(
    values: Float[np.ndarray, "ways n"], length: np.ndarray
) -> np.ndarray:
    """Powers of the length by which values grow between the last two lengths."""
    steps = np.diff(np.log(values[:, -2:]), axis=1)[:, 0]
    return steps / np.diff(np.log(length[-2:].astype(float)))


def _through(terms: Callable[[int], tuple[flops.Term, ...]]) -> PolynomialPair:
    """Finds the polynomials through the counts at 1, 2 and 3 tokens."""
    found = [terms(length) for length in (1, 2, 3)]
    attention = [tuple(x for x in each if x.growth == "s^2") for each in found]
    return _polynomial(found), _polynomial(attention)


def _polynomial(counts: list[tuple[flops.Term, ...]]) -> Polynomial:
    one, two, three = map(flops.total, counts)
    square = (three - 2 * two + one) // 2
    linear = two - one - 3 * square
    return Polynomial(one - linear - square, linear, square)
