"""Top-k of each row without sorting the vocabulary.

Tokens rank by logit, equal ones by lower id. A first pass computes the maxima of
blocks; only the blocks that can contain a result are read again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, UInt

from jaxkv import validation
from pallas_kernels import devices

Score = Callable[[Array, Array], Array]
"""(logits [rows, n], ids [rows or 1, n]) -> the scores to be compared."""


def wide(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Converts logits to at least float32."""
    narrow = jnp.finfo(logits.dtype).bits < 32
    return logits.astype(jnp.float32) if narrow else logits


def argmax(
    logits: Float[Array, "rows vocab"], score: Score = lambda logits, ids: logits
) -> tuple[Float[Array, " rows"], Int32[Array, " rows"]]:
    """Returns the best score and its token, the lowest id among equals.

    One pass reduces the row to the best score of each block; then one block is read
    again. XLA's own argmax compares token by token: 30 times slower on a CPU.
    """
    rows, vocab = logits.shape
    blocks = _blocks(logits)
    _, num_blocks, size = blocks.shape
    every = jnp.arange(num_blocks, dtype=jnp.int32)[None, :]
    ids = _ids_of(every, size)
    scores = score(blocks.reshape(rows, -1), ids).reshape(blocks.shape)
    peaks = jnp.max(scores, axis=2)
    top = jnp.max(peaks, axis=1)
    best = lowest_id(peaks == top[:, None], every)[:, None]
    inside = jnp.take_along_axis(scores, best[:, :, None], axis=1).reshape(rows, -1)
    ids = _ids_of(best, size)
    # XLA may compute a score twice, with another last bit: compare scores of one
    # computation.
    peak = jnp.max(inside, axis=1, keepdims=True)
    return top, lowest_id((inside == peak) & (ids < vocab), ids)


def argmax_checked(
    logits: Float[Array, "rows vocab"], raw: Float[Array, "rows vocab"] | None = None
) -> tuple[Float[Array, " rows"], Int32[Array, " rows"], Bool[Array, " rows"]]:
    """Returns the results of `argmax` and `is_invalid`.

    On a CPU several simple passes are fastest. A GPU reads the row once, in one launch.
    """
    if devices.current_target().platform != "cpu":
        return argmax_checked_in_one_pass(logits, raw)
    top, token = argmax(logits)
    return top, token, is_invalid(logits, top, raw)


def argmax_checked_in_one_pass(
    logits: Float[Array, "rows vocab"], raw: Float[Array, "rows vocab"] | None = None
) -> tuple[Float[Array, " rows"], Int32[Array, " rows"], Bool[Array, " rows"]]:
    """Computes `argmax_checked` as one reduction, independent of its order."""
    wrong = jnp.isnan(logits)
    if raw is not None:
        wrong |= ~jnp.isfinite(raw)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def better(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        wins = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return *(jnp.where(wins, x, y) for x, y in zip(a[:2], b[:2], strict=True)), (
            a[2] | b[2]
        )

    none = (logits.dtype.type(-np.inf), np.iinfo(np.int32).max, np.False_)
    start = tuple(
        np.asarray(x, y)
        for x, y in zip(none, (logits.dtype, np.int32, bool), strict=True)
    )
    top, token, wrong = lax.reduce((logits, ids, wrong), start, better, (1,))
    return top, token, wrong | (top == -jnp.inf)


@validation.checks_numbers()
def candidates(
    logits: Float[Array, "rows vocab"], num: int
) -> tuple[Float[Array, "rows num"], Int32[Array, "rows num"]]:
    """Returns the `num` best tokens of each row, best first; lower ids first if equal.

    They are in the `num` blocks with the largest maxima, since each of these contains a
    token that ranks before all tokens of the remaining blocks. Do not slice the result:
    XLA would merge the slices, not recognise a top-k, and sort.
    """
    num = min(num, logits.shape[1])
    if num == 1:
        top, token = argmax(logits)
        return top[:, None], token[:, None]
    blocks = _blocks(logits)
    rows, num_blocks, size = blocks.shape
    if num_blocks <= 2 * num:
        values, ids = lax.top_k(_unsigned_zero(logits), num)
        return values, ids
    _, chosen = lax.top_k(_unsigned_zero(jnp.max(blocks, axis=2)), num)
    # Back in the order of ids, by which top_k breaks ties.
    chosen = jnp.sort(chosen, axis=1)
    inside = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    inside = _unsigned_zero(inside).reshape(rows, -1)
    values, place = lax.top_k(inside, num)
    return values, jnp.take_along_axis(_ids_of(chosen, size), place, axis=1)


def is_invalid(
    logits: Float[Array, "rows vocab"],
    top: Float[Array, " rows"],
    raw: Float[Array, "rows vocab"] | None = None,
) -> Bool[Array, " rows"]:
    """Returns True for rows with a NaN or with -inf only; with `raw`, not all finite.

    XLA's CPU maximum loses NaN in some shapes, so `top` is not sufficient. A sum
    propagates NaN at a third of the cost of testing every logit; the test runs only if
    a sum is NaN, which also happens if +inf and -inf are added. The sum of `raw` is not
    finite if one entry is not.
    """
    suspect = jnp.any(jnp.isnan(jnp.sum(logits, axis=1)))
    if raw is not None:
        suspect |= ~jnp.all(jnp.isfinite(jnp.sum(raw, axis=1)))

    def look() -> Array:
        has_nan = jnp.any(jnp.isnan(logits), axis=1)
        return has_nan if raw is None else has_nan | ~jnp.all(jnp.isfinite(raw), axis=1)

    with jax.named_scope("suspect"):
        is_bad = lax.cond(suspect, look, lambda: jnp.zeros(top.shape, bool))
    return is_bad | (top == -jnp.inf)


def is_finite(logits: Float[Array, "rows vocab"]) -> Bool[Array, " rows"]:
    """Returns True for rows without NaN and infinities."""
    return jnp.all(jnp.isfinite(logits), axis=1)


def is_up_to(values: Array, ids: Array, last: tuple[Array, Array]) -> Array:
    """Marks tokens that rank at or before the last one, given as (value, id)."""
    value = last[0][:, None]
    token = last[1][:, None]
    return (values > value) | ((values == value) & (ids <= token))


def to_ordered_bits(values: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Maps floats without NaN to unsigned integers with the same order."""
    raw = lax.bitcast_convert_type(
        _unsigned_zero(values), jnp.dtype(f"uint{values.dtype.itemsize * 8}")
    )
    sign = ~(~jnp.zeros_like(raw) >> 1)
    return jnp.where(raw >= sign, ~raw, raw | sign)


def from_ordered_bits(
    order: UInt[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Inverts `to_ordered_bits`."""
    sign = ~(~jnp.zeros_like(order) >> 1)
    raw = jnp.where(order >= sign, order ^ sign, ~order)
    return lax.bitcast_convert_type(raw, dtype)


def lowest_id(
    where: Bool[Array, "rows n"], ids: Int32[Array, "#rows n"]
) -> Int32[Array, " rows"]:
    """Returns the lowest of the marked ids; 0 if none is marked."""
    none = np.iinfo(np.int32).max
    lowest = jnp.min(jnp.where(where, ids, none), axis=1)
    return jnp.where(lowest == none, 0, lowest)


def _unsigned_zero(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replaces -0 by 0: they are equal, but top_k and bit patterns distinguish them."""
    return jnp.where(logits == 0, jnp.zeros_like(logits), logits)


def _blocks(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks block"]:
    """Splits rows into blocks of about 64, of which a first pass takes the maxima."""
    rows, vocab = logits.shape
    # A divisor of vocab, since padding the last block would copy the logits.
    sizes = [size for size in range(16, 129) if vocab % size == 0]
    size = min(sizes, key=lambda size: abs(size - 64), default=64)
    if vocab % size:
        padding = ((0, 0), (0, -vocab % size))
        logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return logits.reshape(rows, -1, size)


def _ids_of(block: Int32[Array, "rows blocks"], size: int) -> Int32[Array, "rows n"]:
    inside = jnp.arange(size, dtype=jnp.int32)[None, None, :]
    return (block[:, :, None] * size + inside).reshape(block.shape[0], -1)
