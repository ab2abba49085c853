"""Exact cut-offs of top-k and top-p.

For most rows a few of the best tokens determine the cut-off. For the remaining rows a
bisection finds it, one row at a time, on integers in the order of the floats. Which of
the two applies depends on the row only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt

from jaxkv.sampling import fixed_point, top_k
from jaxkv.sampling.params import Params


class Cut(NamedTuple):
    """The last token that a row keeps; among equal logits lower ids are kept first."""

    value: Float[Array, " rows"]
    token: Int32[Array, " rows"]


def is_cut(params: Params, vocab: int) -> Bool[Array, " rows"]:
    """Returns True for rows with top-k or top-p; min-p needs no search."""
    return ((params.top_k > 0) & (params.top_k < vocab)) | (params.top_p < 1)


def scale_logits(
    logits: Float[Array, "rows n"], top: Float[Array, " rows"], params: Params
) -> Float[Array, "rows n"]:
    """Returns log-probabilities up to a constant: 0 at the largest logit.

    The result is 0 also at a largest logit of +inf.
    """
    # Rows at temperature 0 are handled elsewhere; this avoids a division by zero.
    warm = jnp.where(params.temperature > 0, params.temperature, 1.0)
    below = (logits - top[:, None]) / warm.astype(logits.dtype)[:, None]
    return jnp.where(logits == top[:, None], jnp.zeros_like(below), below)


def above_min_p(
    scaled: Float[Array, "rows n"], params: Params
) -> Bool[Array, "rows n"]:
    """Marks tokens whose probability is at least min-p times the largest."""
    share = params.min_p.astype(scaled.dtype)
    # -log1p is the log. XLA's CPU log rounds differently in batches of 3, 5, 6 and 7
    # rows than in other batches.
    return scaled >= -jnp.log1p((1 - share) / share)[:, None]


def cut_from_candidates(
    logits: Float[Array, "rows vocab"],
    top: Float[Array, " rows"],
    values: Float[Array, "rows num"],
    params: Params,
    wanted: Bool[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"]]:
    """Finds the cut-offs of top-k and top-p from the best tokens, where possible.

    Args:
      logits: logits of the rows, read only if a row needs its whole mass.
      top: the largest logit of each row.
      values: the largest logits of each row, descending.
      params: parameters of the rows.
      wanted: True for rows that need a cut-off.

    Returns:
      Number of tokens kept, and True if that is exact; it is not if more tokens are
      kept than there are values, or if top-k keeps more than that before top-p.
    """
    vocab = logits.shape[1]
    num = values.shape[1]
    dtype = logits.dtype
    bits = fixed_point.digit_bits(vocab)
    counted = (params.top_k > 0) & (params.top_k < vocab)
    inside = (counted & (params.top_k <= num)) | (num == vocab)
    limit = jnp.where(counted & inside, params.top_k, num)
    nucleus = params.top_p < 1

    weights = jnp.exp(scale_logits(values, top, params))
    place = jnp.arange(num, dtype=jnp.int32)[None, :]
    weights = jnp.where(place < limit[:, None], weights, 0)
    running = jnp.cumsum(
        jnp.stack(fixed_point.to_digits(weights, bits)), axis=2, dtype=jnp.int32
    )
    running = fixed_point.carry_digits(tuple(running), bits)

    within = tuple(digit[:, -1] for digit in running)
    with jax.named_scope("whole_mass"):
        exact = lax.cond(
            jnp.any(wanted & nucleus & ~counted & ~inside),
            lambda: fixed_point.sum_digits(
                fixed_point.to_digits(jnp.exp(scale_logits(logits, top, params)), bits),
                bits,
            ),
            lambda: within,
        )
    total = tuple(jnp.where(inside, a, b) for a, b in zip(within, exact, strict=True))
    target = fixed_point.fraction_of(params.top_p, total, bits, dtype)
    short = ~fixed_point.is_at_least(running, tuple(digit[:, None] for digit in target))
    reach = 1 + jnp.sum(short, axis=1, dtype=jnp.int32)
    num_allowed = jnp.where(nucleus, reach, limit)
    return num_allowed, (num_allowed <= limit) & (inside | (nucleus & ~counted))


def keep_everything(logits: Float[Array, "rows vocab"]) -> Cut:
    """Returns the cut that keeps every token of every row."""
    rows, vocab = logits.shape
    none = jnp.full((rows,), -jnp.inf, logits.dtype)
    return Cut(none, jnp.full((rows,), vocab, jnp.int32))


def find_exact_cuts(
    logits: Float[Array, "rows vocab"],
    top: Float[Array, " rows"],
    params: Params,
    wanted: Bool[Array, " rows"],
    default: Cut,
) -> Cut:
    """Finds the cut-offs of the wanted rows by bisection; any row can be cut this way.

    Rows are processed one at a time, so that cost and bits of a row's result do not
    depend on the batch. The remaining rows keep the cut in `default`.
    """

    def step(state: tuple[Array, Cut]) -> tuple[Array, Cut]:
        pending, cut = state
        row = jnp.argmax(pending)
        one = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, row, 1), (logits, top, params)
        )
        cut = jax.tree.map(
            lambda rows, new: lax.dynamic_update_slice_in_dim(rows, new, row, axis=0),
            cut,
            _exact_cut(*one),
        )
        return pending.at[row].set(False), cut

    return lax.while_loop(lambda state: jnp.any(state[0]), step, (wanted, default))[1]


def _exact_cut(
    logits: Float[Array, "1 vocab"], top: Float[Array, " 1"], params: Params
) -> Cut:
    """Finds the cut of one row, which needs one and has no NaN and a finite maximum."""
    vocab = logits.shape[1]
    dtype = logits.dtype
    bits = fixed_point.digit_bits(vocab)
    order = top_k.to_ordered_bits(logits)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]

    def narrow(stage: Array, last: tuple[Array, Array]) -> tuple[Array, Array]:
        # Stage 0 is top-k, with weight 1 for each token; stage 1 is top-p.
        weights = jnp.exp(scale_logits(logits, top, params))
        weights = jnp.where(stage == 0, jnp.ones_like(weights), weights)
        mask = top_k.is_up_to(order, ids, last)
        digits = fixed_point.to_digits(jnp.where(mask, weights, 0), bits)
        share = fixed_point.fraction_of(
            params.top_p, fixed_point.sum_digits(digits, bits), bits, dtype
        )
        count = fixed_point.to_digits(params.top_k.astype(dtype), bits)
        target = tuple(
            jnp.where(stage == 0, k, p) for k, p in zip(count, share, strict=True)
        )
        return _last(order, ids, top_k.to_ordered_bits(top), digits, bits, target)

    counted = (params.top_k > 0) & (params.top_k < vocab)
    first_stage = jnp.where(counted, 0, 1)[0]
    end_stage = jnp.where(params.top_p < 1, 2, 1)[0]
    start = jnp.zeros_like(order[:, 0]), jnp.full((1,), vocab, jnp.int32)
    key, token = lax.fori_loop(first_stage, end_stage, narrow, start)
    return Cut(top_k.from_ordered_bits(key, dtype), token)


def _last(
    order: UInt[Array, "1 vocab"],
    ids: Int32[Array, "1 vocab"],
    top: UInt[Array, " 1"],
    digits: fixed_point.Mass,
    bits: int,
    target: fixed_point.Mass,
) -> tuple[UInt[Array, " 1"], Int32[Array, " 1"]]:
    """Returns the first rank at which the cumulative mass reaches the target.

    Bisects the value, then the id among the tokens with that value. The number of
    passes over the row is at most the bits of a float plus those of the number of ties.
    """

    def enough(mask: Array) -> Array:
        kept_digits = tuple(jnp.where(mask, digit, 0) for digit in digits)
        return fixed_point.is_at_least(
            fixed_point.sum_digits(kept_digits, bits), target
        )

    def largest(passes: Callable[[Array], Array], low: Array, high: Array) -> Array:
        def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            yes = passes(middle)
            return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

        def has_gap(bounds: tuple[Array, Array]) -> Array:
            return jnp.any(bounds[1] - bounds[0] > 1)

        return lax.while_loop(has_gap, halve, (low, high))[0]

    value = largest(
        lambda value: enough(order >= value[:, None]), jnp.zeros_like(top), top + 1
    )
    equal = order == value[:, None]
    first_id = jnp.min(jnp.where(equal, ids, ids.size), axis=1)
    last_id = jnp.max(jnp.where(equal, ids, 0), axis=1)
    left_out = largest(
        lambda left_out: enough(
            top_k.is_up_to(order, ids, (value, last_id - left_out))
        ),
        jnp.zeros_like(last_id),
        last_id - first_id + 1,
    )
    return value, last_id - left_out
