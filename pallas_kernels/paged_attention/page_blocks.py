"""Gather of blocks of keys and values from their pages, for the reference.

A block is a range of positions of every row. Pages are indexed by (page, head, part of
a page), so that the gather needs no transposition.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import quantizing
from pallas_kernels.layered import Layer


class PagedKV(NamedTuple):
    """Keys and values in pages, of one layer or of several."""

    k: Num[Array, "pages kv_heads page_size key_width"]
    """Keys of one layer, or of `num_layers` layers concatenated; of a floating type, or
    of 8 bits as `quantizing` makes them."""
    v: Num[Array, "pages kv_heads page_size value_width"] | None = None
    """Values of the same type, of any width; None if the values are the first
    `value_width` numbers of the keys, with the scales of the keys."""
    k_scales: Float[Array, "pages kv_heads *k_places"] | None = None
    """Only for 8-bit pages, scale of the keys of a page and head, or with one more axis
    of page_size, of each key."""
    v_scales: Float[Array, "pages kv_heads *v_places"] | None = None
    """Only for 8-bit pages, scales of the values; None if these are part of the
    keys."""
    value_width: int | None = None
    """Width of the values in [1, head_dim] if `v` is None."""
    k_rest: Float[Array, "pages kv_heads page_size rest"] | None = None
    """Only for 8-bit pages without `v`, further numbers of the keys, which are not
    quantized: head_dim is the sum of both widths."""
    layer: Layer = 0
    """Index of the layer, in [0, num_layers)."""
    num_layers: int = 1
    """Number of layers, a divisor of the number of pages."""

    @property
    def output_width(self) -> int:
        """Width of the values, which is that of the attention's output."""
        width = self.value_width if self.v is None else self.v.shape[3]
        assert width is not None
        return width


class RowView(NamedTuple):
    """Positions of the rows, and the pages with the keys that each row attends to.

    A row attends to the keys at positions 0 to its own, or to the last `window` of
    them. With `ancestors` it attends instead to all positions below `context` of its
    slot, and to position `context + j` if `ancestors[row, j]`: the branches of a token
    tree are stored one after another there, and a chain is the lower triangle. A slot
    whose context is -1 has no tree, and its rows no ancestors.
    """

    page_ids: Int[Array, "slots pages_per_slot"]
    """Page table, with ids relative to the layer. An id that is no page of the layer is
    unmapped; no row may attend to a position of it."""
    positions: Int[Array, " rows"]
    """Position of each row; -1 for a padding row, which attends to no key."""
    slots: Int[Array, " rows"] | None = None
    """Slot of each row; rows of a slot are contiguous and in ascending order. None if
    all slots have the same number of rows, in order: one each to decode, several to
    verify drafts."""
    context: Int[Array, " slots"] | None = None
    """Positions that every row of the slot attends to, or -1; required with
    `ancestors`."""
    ancestors: Bool[Array, "rows columns"] | None = None
    """Mask of the slot's tree positions."""
    window: int | None = None
    """Number of latest keys of a row, at least 1; None means all. On a GPU, positions
    between two windows of a slot must not hold NaN."""


class KVBlock(NamedTuple):
    """Keys and values of one block of positions, for every row."""

    k: Float[Array, "rows kv_heads places head_dim"]
    v: Float[Array, "rows kv_heads places value_width"]
    k_scales: Float[Array, "rows kv_heads places"] | None
    v_scales: Float[Array, "rows kv_heads places"] | None


def product_dtype(q_type: DTypeLike, memory: PagedKV) -> np.dtype:
    """Returns the type in which queries, keys, weights and values are multiplied.

    8-bit numbers are exact in every type. But weights times the scales of values are
    often too small for float16.
    """
    q_type = np.dtype(q_type)
    page_type = np.dtype(memory.k.dtype)
    narrow = page_type.itemsize == 1 and q_type != np.float16
    if q_type == page_type or narrow:
        return q_type
    wide = np.promote_types(q_type, np.float32)
    return wide if page_type.itemsize == 1 else np.promote_types(wide, page_type)


def read_block(
    memory: PagedKV,
    page_ids: Int[Array, "rows pages_per_slot"],
    index: Int[Array, ""],
    used: Bool[Array, "rows places"],
    dtype: DTypeLike,
    *,
    clean_keys: bool = False,
) -> KVBlock:
    """Reads one block of keys and values for every row.

    Args:
      memory: the pages.
      page_ids: page table, one line for each row.
      index: index of the block.
      used: mask of the block's positions that any query of the row attends to. Pages
        without such a position are not read.
      dtype: type of the result.
      clean_keys: True if keys of masked positions must be 0, so that they do not
        contribute to derivatives.

    Returns:
      The block; values of masked positions are 0, their keys and scales undefined.
    """
    num_pages, kv_heads, page_size, _ = memory.k.shape
    (rows, size), (_, width) = used.shape, page_ids.shape
    # A block is a whole number of equal parts of pages.
    part = math.gcd(page_size, size)
    parts_per_page = page_size // part
    parts = size // part
    used = used.reshape(rows, parts, part)
    which = index * parts + jnp.arange(parts, dtype=jnp.int32)
    column = which // parts_per_page
    ids = page_ids[:, jnp.minimum(column, width - 1)]
    mapped = (column < width)[None, :] & (ids >= 0) & (ids < num_pages)
    ids = jnp.where(mapped & jnp.any(used, axis=2), ids, 0)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    page = ids[:, None, :] * kv_heads + head  # of one head
    address = page * parts_per_page + (which % parts_per_page)[None, None, :]

    def take(pages: Array, *, clean: bool = False) -> Array:
        """Gathers whole rows of a matrix, which is fastest on a CPU."""
        flat = pages.reshape(num_pages * kv_heads * parts_per_page, -1)
        words = flat.at[address.reshape(-1)].get(mode="promise_in_bounds")
        if clean:
            shape = (rows, kv_heads, parts, part, pages.shape[3])
            held = jnp.broadcast_to(used[:, None, :, :, None], shape)
            zero = jnp.zeros((), words.dtype)
            words = jnp.where(held.reshape(words.shape), words, zero)
        words = lax.optimization_barrier(words)
        return words.reshape(rows, kv_heads, size, -1)

    def scale(pages: Array | None) -> Array | None:
        if pages is None:
            return None
        if pages.ndim == 3:
            return take(pages)[..., 0]
        scales = pages.reshape(-1).at[page].get(mode="promise_in_bounds")
        return jnp.repeat(scales, part, axis=2)

    clean_keys |= memory.v is None
    k = quantizing.as_number_type(take(memory.k, clean=clean_keys)).astype(dtype)
    k_scales = scale(memory.k_scales)
    if memory.v is None:
        if memory.k_rest is None or k_scales is None:
            return KVBlock(k, k[..., : memory.value_width], k_scales, k_scales)
        # The scales apply to a part of the keys; those of masked positions may be NaN.
        held = used.reshape(rows, 1, size)
        k = k * jnp.where(held, k_scales, 0).astype(dtype)[..., None]
        k_rest = take(memory.k_rest, clean=True).astype(dtype)
        v = k[..., : memory.value_width]
        return KVBlock(jnp.concatenate([k, k_rest], axis=-1), v, None, None)
    v = quantizing.as_number_type(take(memory.v, clean=True)).astype(dtype)
    return KVBlock(k, v, k_scales, scale(memory.v_scales))
