"""FLOPs of generating a token with and without a KV cache.

Without a cache, every token needs a forward pass over the whole prefix of t tokens.
With a cache, only the last token is fed, and attends to the keys of all t. Both counts
are polynomials in t, for a token and, summed, for a text.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments import lab
from scaling import costs
from scaling.costs import FlopTerm, decode_terms, forward_terms
from scaling.shapes import ModelShape


class Polynomial(NamedTuple):
    """FLOPs of the token after t tokens: constant + linear t + square t^2."""

    constant: int
    linear: int
    square: int

    def at(self, length: int) -> int:
        """Returns the FLOPs of the token generated from `length` tokens."""
        return self.constant + self.linear * length + self.square * length**2

    def total(self, length: int) -> int:
        """Returns the FLOPs of all tokens generated from 1, 2, ..., `length` tokens."""
        first = length * (length + 1) // 2
        squares = first * (2 * length + 1) // 3
        return self.constant * length + self.linear * first + self.square * squares


type PolynomialPair = tuple[Polynomial, Polynomial]
"""All FLOPs, and the FLOPs of attention scores and values."""
FLOP_COLUMNS = ("without_flops", "with_flops", "text_without_flops", "text_with_flops")
"""Keys in metrics, for a token and for a text."""


class FlopCounts(lab.ResultRecord):
    """FLOPs by length, without a cache and with one."""

    name: str = lab.column("model")
    length: Int[np.ndarray, " lengths"] = lab.column("tokens")
    token_flops: Float[np.ndarray, "2 lengths"] = lab.column("of the next token")
    total_flops: Float[np.ndarray, "2 lengths"] = lab.column("of all tokens up to it")
    attention_flops: Float[np.ndarray, "2 lengths"] = lab.column(
        "part of the total for attention scores and values"
    )

    def rows(self) -> list[lab.Row]:
        """Returns a row per length, for JSON."""
        totals = self.total_flops
        columns = zip(FLOP_COLUMNS, (*self.token_flops, *totals), strict=True)
        ratio = {"text_ratio": totals[0] / totals[1]}
        return lab.to_rows({"tokens": self.length} | dict(columns) | ratio)


def without_cache(model: ModelShape) -> PolynomialPair:
    """Returns the FLOPs of a forward pass over the prefix, with the last logits only.

    Pairs of query and key are counted as in causal attention.
    """
    return _through(
        lambda length: forward_terms(
            model, sequence=length, attention="causal", logits="last"
        )
    )


def with_cache(model: ModelShape) -> PolynomialPair:
    """Returns the FLOPs of feeding one token that attends to all keys."""
    return _through(lambda length: decode_terms(model, context=length))


def count_flops(model: ModelShape, lengths: tuple[int, ...]) -> FlopCounts:
    """Counts the FLOPs of both ways at the given lengths.

    Args:
      model: shape; no layer may have a sliding window.
      lengths: tokens, at least 1.

    Raises:
      ValueError: a layer has a sliding window, so counts are not polynomials.
    """
    if any(model.windows):
        raise ValueError(f"{model.name}: layers must not have sliding windows")
    ways = without_cache(model), with_cache(model)
    counts = (
        [[polynomial.at(n) for n in lengths] for polynomial, _ in ways],
        [[polynomial.total(n) for n in lengths] for polynomial, _ in ways],
        [[attention.total(n) for n in lengths] for _, attention in ways],
    )
    return FlopCounts(
        model.name, np.array(lengths), *(np.array(x, float) for x in counts)
    )


def growth_exponents(
    values: Float[np.ndarray, "ways n"], length: np.ndarray
) -> np.ndarray:
    """Returns the exponent of growth between the last two lengths."""
    steps = np.diff(np.log(values[:, -2:]), axis=1)[:, 0]
    return steps / np.diff(np.log(length[-2:].astype(float)))


def _through(terms: Callable[[int], tuple[FlopTerm, ...]]) -> PolynomialPair:
    """Fits the polynomials through the counts at 1, 2 and 3 tokens."""
    term_lists = [terms(length) for length in (1, 2, 3)]
    attention = [
        tuple(x for x in term_list if x.growth == "s^2") for term_list in term_lists
    ]
    return _polynomial(term_lists), _polynomial(attention)


def _polynomial(counts: list[tuple[FlopTerm, ...]]) -> Polynomial:
    one, two, three = map(costs.total_flops, counts)
    square = (three - 2 * two + one) // 2
    linear = two - one - 3 * square
    return Polynomial(one - linear - square, linear, square)
