"""Packed rows: blocks of queries that read the same keys.

A matrix product of the tensor cores has 64 rows, and a decoding step has one query a
sequence. So queries that read the same keys of a KV head are packed: `tokens` rows of
one slot (nodes of a tree, a chunk, or one row) times the `group` query heads of the KV
head. They are at row `token * group + head_in_group` of a block; other rows are
padding.

Source: the packing of token x group in FlashInfer, Ye et al. 2025, arXiv:2501.01005.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from pallas_kernels.devices import ROW_ALIGNMENT, WGMMA_ROWS


class Packing(NamedTuple):
    """Block and index of each row, and the row at each index of each block."""

    row: Int32[Array, "blocks tokens"]
    """Row at each index; `rows`, one past the end, for padding."""
    slot: Int32[Array, " blocks"]
    """Slot whose keys the block reads; 0 for a block without rows."""
    block: Int32[Array, " rows"]
    """Block of each row; `blocks`, one past the end, for rows that are not packed."""
    token: Int32[Array, " rows"]
    """Index of the row in its block; 0 for rows that are not packed."""


class SlotRuns(NamedTuple):
    """The live rows of each row's slot; undefined for rows that are not live."""

    count: Int32[Array, " rows"]
    """Number of live rows of the slot."""
    nth: Int32[Array, " rows"]
    """Number of live rows of the slot before this row."""
    begin: Int32[Array, " rows"]
    """First live row of the slot."""
    end: Int32[Array, " rows"]
    """One past the last live row of the slot."""


def find_slot_runs(slots: Int[Array, " rows"], live: Bool[Array, " rows"]) -> SlotRuns:
    """Finds the live rows of each slot, by comparing all rows in one kernel.

    Args:
      slots: slot of each row.
      live: mask of the rows that count.

    Returns:
      The runs.
    """
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    # Computed before, so that a pair takes one comparison: XLA may write a longer
    # expression to memory in a separate kernel.
    slots = lax.optimization_barrier(jnp.where(live, slots, -1).astype(jnp.int32))
    same = slots[None, :] == slots[:, None]
    nth = same & (index[None, :] < index[:, None])
    begin = jnp.where(same, index[None, :], slots.shape[0])
    end = jnp.where(same, index[None, :] + 1, 0)
    runs = reduce_together(
        (lax.add, 0, same),
        (lax.add, 0, nth),
        (lax.min, slots.shape[0], begin),
        (lax.max, 0, end),
    )
    return SlotRuns(*runs)


def reduce_together(
    *parts: tuple[Callable, int, Shaped[Array, "*lead columns"]],
) -> list[Int32[Array, "*lead"]]:
    """Reduces along the last axis, in one kernel on a GPU.

    XLA may compile reductions with a common operand to one kernel for the operand and
    one for each reduction.

    Args:
      *parts: binary function, neutral element and operand of each reduction, all
        operands of one shape; converted to int32.

    Returns:
      Results of the reductions.
    """
    joins, starts, values = zip(*parts, strict=True)
    values = jnp.broadcast_arrays(*(x.astype(jnp.int32) for x in values))

    def join(x, y):
        return [f(a, b) for f, a, b in zip(joins, x, y, strict=True)]

    axis = values[0].ndim - 1
    return lax.reduce(list(values), [jnp.int32(x) for x in starts], join, [axis])


def num_block_rows(*, tokens: int, group: int) -> int:
    """Returns the packed rows of a block, padding included; both are at least 1.

    A multiple of 8, the granularity of TMA, up to 64 rows; beyond them a multiple of
    64, one matrix product of a warpgroup each.
    """
    unit = ROW_ALIGNMENT if tokens * group <= WGMMA_ROWS else WGMMA_ROWS
    return -(-tokens * group // unit) * unit


def max_query_blocks(*, num_rows: int, num_slots: int, tokens: int) -> int:
    """Returns a bound on the blocks of `num_rows` rows of `num_slots` slots.

    A slot with n rows fills ceil(n / tokens) <= 1 + (n - 1) / tokens blocks. All counts
    are at least 1. 10 rows of 3 slots in blocks of 4: 3 + 7 // 4 = 4.
    """
    used = min(num_rows, num_slots)
    return used + (num_rows - used) // tokens


def pack_one_row_per_slot(live: Bool[Array, " rows"]) -> Packing:
    """Packs row i, of slot i, into block i, of one token, if it is live."""
    num_rows = live.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    index = jnp.where(live, row, num_rows)
    return Packing(index[:, None], row, index, jnp.zeros_like(row))


def pack_rows(
    slots: Int[Array, " rows"],
    live: Bool[Array, " rows"],
    *,
    num_slots: int,
    tokens: int,
    max_rows: int | None = None,
    nth: Int32[Array, " rows"] | None = None,
) -> Packing:
    """Packs the rows of each slot, in order, into blocks of `tokens` rows.

    Args:
      slots: slot of each row, in [0, num_slots) if live; the live rows of a slot are
        contiguous.
      live: mask of the rows to pack.
      num_slots: number of slots, static.
      tokens: rows of one slot in a block, static.
      max_rows: bound on the live rows of a slot, static; None means no bound.
      nth: number of live rows of the slot before each live row; None computes it.

    Returns:
      The packing, of at most `max_query_blocks` blocks; used blocks come first.
    """
    num_rows = slots.shape[0]
    num_blocks = max_query_blocks(num_rows=num_rows, num_slots=num_slots, tokens=tokens)
    if max_rows is not None:
        num_blocks = min(num_blocks, num_slots * -(-max_rows // tokens))
    # Comparisons of all with all: XLA has one kernel for each of their three sums, and
    # one or two for any cumulative sum or scatter.
    index = jnp.arange(num_rows, dtype=jnp.int32)
    slots = jnp.where(live, slots, -1).astype(jnp.int32)
    if nth is None:
        same = live[None, :] & (slots[None, :] == slots[:, None])
        same &= index[None, :] < index[:, None]
        nth = jnp.sum(same, axis=1, dtype=jnp.int32)
    token = jnp.where(live, lax.rem(nth, jnp.int32(tokens)), 0)
    opens = live & (token == 0)
    # The sum is directly the result; any change would be another kernel.
    is_first = (index == 0).astype(jnp.int32)[None, :]
    passed = (opens[None, :] & (index[None, :] <= index[:, None])).astype(jnp.int32)
    passed = jnp.where(live[:, None], passed - is_first, is_first * num_blocks)
    block = jnp.sum(passed, axis=1, dtype=jnp.int32)
    at = block * tokens + token
    place = jnp.arange(num_blocks * tokens, dtype=jnp.int32)
    row = jnp.where(at[None, :] == place[:, None], index[None, :], num_rows)
    row = jnp.min(row, axis=1).reshape(num_blocks, tokens)
    # All rows of a block have the same slot; a maximum fuses with those of
    # `decode_plan`.
    slot = jnp.max(slots.at[row].get(mode="fill", fill_value=0), axis=1)
    return Packing(row, slot, block, token)


def pack_queries(
    q: Float[Array, "rows q_heads head_dim"], packing: Packing, *, kv_heads: int
) -> Float[Array, "blocks {kv_heads} block_rows head_dim"]:
    """Packs queries into blocks, one block for every KV head.

    Query head h reads KV head `h // (q_heads // kv_heads)`. Padding is zero.
    """
    (num_blocks, tokens), (_, q_heads, head_dim) = packing.row.shape, q.shape
    group = q_heads // kv_heads
    blocks = q.at[packing.row].get(mode="fill", fill_value=0)
    blocks = blocks.reshape(num_blocks, tokens, kv_heads, group, head_dim)
    blocks = blocks.swapaxes(1, 2).reshape(num_blocks, kv_heads, -1, head_dim)
    padding = num_block_rows(tokens=tokens, group=group) - tokens * group
    return jnp.pad(blocks, [(0, 0), (0, 0), (0, padding), (0, 0)])


def pack_values(
    values: Shaped[Array, " rows"], packing: Packing, *, fill: int
) -> Shaped[Array, "blocks tokens"]:
    """Packs one number a row into blocks; `fill` for padding."""
    return values.at[packing.row].get(mode="fill", fill_value=fill)


def expand_to_packed_rows(
    packed: Shaped[Array, "blocks tokens"], *, group: int
) -> Shaped[Array, "blocks wgmma_rows"]:
    """Repeats numbers of rows over packed rows, padded to whole matrix products.

    Each of the `group` query heads of a KV head gets the row's number; padding gets 0.
    """
    num_blocks, tokens = packed.shape
    # Not `repeat`, which is a scatter.
    packed_rows = jnp.broadcast_to(packed[..., None], (num_blocks, tokens, group))
    packed_rows = packed_rows.reshape(num_blocks, tokens * group)
    return jnp.pad(packed_rows, [(0, 0), (0, -tokens * group % WGMMA_ROWS)])


def unpack_rows(
    blocks: Shaped[Array, "blocks kv_heads block_rows *rest"],
    packing: Packing,
    *,
    group: int,
    fill: float,
) -> Shaped[Array, "rows q_heads *rest"]:
    """Unpacks results to rows and query heads; rows that are not packed get `fill`."""
    num_blocks, kv_heads, _, *tail_shape = blocks.shape
    tokens = packing.row.shape[1]
    blocks = blocks[:, :, : tokens * group]
    blocks = blocks.reshape(num_blocks, kv_heads, tokens, group, *tail_shape)
    # Padding is undefined, so rows that are not packed are selected, not multiplied by
    # 0.
    is_packed = packing.block < num_blocks
    index = jnp.where(is_packed, packing.block, 0), slice(None), packing.token
    rows = blocks[index].reshape(is_packed.shape[0], kv_heads * group, *tail_shape)
    mask = is_packed.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(mask, rows, jnp.asarray(fill, rows.dtype))
