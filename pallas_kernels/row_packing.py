"""Packed rows: the queries that read the same keys, side by side in blocks.

A matrix product of the tensor cores has 64 rows, and a decode step has one query a
sequence. So all that read the same keys of a KV head are packed: `tokens` rows of one
slot (a tree's nodes, a chunk, or one) times the `group` query heads of the KV head.
Row `token * group + head_in_group` of a block; the rest of its rows is padding.

Source: the packing of token x group in FlashInfer, Ye et al. 2025, arXiv:2501.01005.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from pallas_kernels.devices import ROW_ALIGNMENT, WGMMA_ROWS


class Packing(NamedTuple):
    """Where each row lies in the blocks, and which row lies at each place of them."""

    row: Int32[Array, "blocks tokens"]
    """Row at each place; `rows`, one past the end, where there is none."""
    slot: Int32[Array, " blocks"]
    """Slot whose keys the block reads; 0 where the block has no rows."""
    block: Int32[Array, " rows"]
    """Block of each row; `blocks`, one past the end, for rows that are left out."""
    token: Int32[Array, " rows"]
    """Place of the row in its block; 0 for rows that are left out."""


class SlotRuns(NamedTuple):
    """Of each row, what all live rows of its slot are; of no meaning where not live."""

    count: Int32[Array, " rows"]
    """How many they are."""
    nth: Int32[Array, " rows"]
    """How many of them come before this row."""
    begin: Int32[Array, " rows"]
    """The first of them."""
    end: Int32[Array, " rows"]
    """One past the last of them."""


def find_slot_runs(slots: Int[Array, " rows"], live: Bool[Array, " rows"]) -> SlotRuns:
    """Compares all rows with all, in one kernel.

    Args:
      slots: slot of each row.
      live: whether the row counts at all.

    Returns:
      The runs.
    """
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    # Made before, so that a pair takes one comparison: what takes more XLA may write
    # to memory in a kernel of its own.
    slots = lax.optimization_barrier(jnp.where(live, slots, -1).astype(jnp.int32))
    same = slots[None, :] == slots[:, None]
    nth = same & (index[None, :] < index[:, None])
    begin = jnp.where(same, index[None, :], slots.shape[0])
    end = jnp.where(same, index[None, :] + 1, 0)
    found = reduce_together(
        (lax.add, 0, same),
        (lax.add, 0, nth),
        (lax.min, slots.shape[0], begin),
        (lax.max, 0, end),
    )
    return SlotRuns(*found)


def reduce_together(
    *parts: tuple[Callable, int, Shaped[Array, "*lead columns"]],
) -> list[Int32[Array, "*lead"]]:
    """Reduces along the last axis, in one kernel on a GPU.

    Reductions that share what they reduce XLA may divide: a kernel for that, and one
    for each of them.

    Args:
      *parts: of each reduction how two numbers become one, what changes none, and the
        numbers, all of one shape; taken as int32.

    Returns:
      Their results.
    """
    joins, starts, values = zip(*parts, strict=True)
    values = jnp.broadcast_arrays(*(x.astype(jnp.int32) for x in values))

    def join(x, y):
        return [f(a, b) for f, a, b in zip(joins, x, y, strict=True)]

    axis = values[0].ndim - 1
    return lax.reduce(list(values), [jnp.int32(x) for x in starts], join, [axis])


def num_block_rows(*, tokens: int, group: int) -> int:
    """Counts the packed rows of a block, padding included; both are at least 1.

    Memory holds multiples of what a transfer can move. Beyond one matrix product they
    are whole ones, a warpgroup each: a multiple of 8 up to 64, else of 64.
    """
    unit = ROW_ALIGNMENT if tokens * group <= WGMMA_ROWS else WGMMA_ROWS
    return -(-tokens * group // unit) * unit


def max_query_blocks(*, num_rows: int, num_slots: int, tokens: int) -> int:
    """Bounds the blocks that rows of so many slots can fill, whatever their split.

    A slot with n rows fills ceil(n / tokens) <= 1 + (n - 1) / tokens blocks. All counts
    are at least 1. 10 rows of 3 slots in blocks of 4: 3 + 7 // 4 = 4.
    """
    used = min(num_rows, num_slots)
    return used + (num_rows - used) // tokens


def pack_one_row_per_slot(live: Bool[Array, " rows"]) -> Packing:
    """Packs row i, which is slot i, into block i, of one token; if it sees any key."""
    num_rows = live.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    kept = jnp.where(live, row, num_rows)
    return Packing(kept[:, None], row, kept, jnp.zeros_like(row))


def pack_rows(
    slots: Int[Array, " rows"],
    live: Bool[Array, " rows"],
    *,
    num_slots: int,
    tokens: int,
    max_rows: int | None = None,
    nth: Int32[Array, " rows"] | None = None,
) -> Packing:
    """Packs the rows of each slot, in their order, into blocks of `tokens`.

    Args:
      slots: slot of each row, in [0, num_slots) where live; the live rows of a slot
        side by side.
      live: whether the row is packed at all.
      num_slots: slots, static.
      tokens: rows of one slot in a block, static.
      max_rows: live rows that no slot has more of, static; None means any number.
      nth: of each live row, how many live rows of its slot come before it; None where
        that is not known yet.

    Returns:
      The packing, of at most `max_query_blocks` blocks; those in use come first.
    """
    num_rows = slots.shape[0]
    num_blocks = max_query_blocks(num_rows=num_rows, num_slots=num_slots, tokens=tokens)
    if max_rows is not None:
        num_blocks = min(num_blocks, num_slots * -(-max_rows // tokens))
    # Comparisons of all with all: XLA has a kernel for each of their three sums, and
    # one or two for any running sum or scatter.
    index = jnp.arange(num_rows, dtype=jnp.int32)
    slots = jnp.where(live, slots, -1).astype(jnp.int32)
    if nth is None:
        same = live[None, :] & (slots[None, :] == slots[:, None])
        same &= index[None, :] < index[:, None]
        nth = jnp.sum(same, axis=1, dtype=jnp.int32)
    token = jnp.where(live, lax.rem(nth, jnp.int32(tokens)), 0)
    opens = live & (token == 0)
    # The sum is the result as it stands, or another kernel would make it so.
    is_first = (index == 0).astype(jnp.int32)[None, :]
    passed = (opens[None, :] & (index[None, :] <= index[:, None])).astype(jnp.int32)
    passed = jnp.where(live[:, None], passed - is_first, is_first * num_blocks)
    block = jnp.sum(passed, axis=1, dtype=jnp.int32)
    at = block * tokens + token
    place = jnp.arange(num_blocks * tokens, dtype=jnp.int32)
    row = jnp.where(at[None, :] == place[:, None], index[None, :], num_rows)
    row = jnp.min(row, axis=1).reshape(num_blocks, tokens)
    # All rows of a block have the same; a maximum, as `decode_plan` takes of others.
    slot = jnp.max(slots.at[row].get(mode="fill", fill_value=0), axis=1)
    return Packing(row, slot, block, token)


def pack_queries(
    q: Float[Array, "rows q_heads head_dim"], packing: Packing, *, kv_heads: int
) -> Float[Array, "blocks {kv_heads} block_rows head_dim"]:
    """Lays the queries out in blocks, one of each for every KV head.

    Query head h reads KV head `h // (q_heads // kv_heads)`. Zeros where no row is.
    """
    (num_blocks, tokens), (_, q_heads, head_dim) = packing.row.shape, q.shape
    group = q_heads // kv_heads
    found = q.at[packing.row].get(mode="fill", fill_value=0)
    found = found.reshape(num_blocks, tokens, kv_heads, group, head_dim)
    found = found.swapaxes(1, 2).reshape(num_blocks, kv_heads, -1, head_dim)
    padding = num_block_rows(tokens=tokens, group=group) - tokens * group
    return jnp.pad(found, [(0, 0), (0, 0), (0, padding), (0, 0)])


def pack_values(
    values: Shaped[Array, " rows"], packing: Packing, *, fill: int
) -> Shaped[Array, "blocks tokens"]:
    """Brings one number a row to its block; `fill` where no row is."""
    return values.at[packing.row].get(mode="fill", fill_value=fill)


def expand_to_packed_rows(
    packed: Shaped[Array, "blocks tokens"], *, group: int
) -> Shaped[Array, "blocks wgmma_rows"]:
    """Spreads numbers of rows over the packed rows, padded to whole matrix products.

    Each of the `group` query heads of a KV head gets it; padding gets 0.
    """
    num_blocks, tokens = packed.shape
    # Not `repeat`, which is a scatter.
    found = jnp.broadcast_to(packed[..., None], (num_blocks, tokens, group))
    found = found.reshape(num_blocks, tokens * group)
    return jnp.pad(found, [(0, 0), (0, -tokens * group % WGMMA_ROWS)])


def unpack_rows(
    blocks: Shaped[Array, "blocks kv_heads block_rows *rest"],
    packing: Packing,
    *,
    group: int,
    fill: float,
) -> Shaped[Array, "rows q_heads *rest"]:
    """Brings packed results back to rows and query heads; rows left out get `fill`."""
    num_blocks, kv_heads, _, *rest = blocks.shape
    tokens = packing.row.shape[1]
    blocks = blocks[:, :, : tokens * group]
    blocks = blocks.reshape(num_blocks, kv_heads, tokens, group, *rest)
    # Padding may hold anything, so that rows left out are chosen, not multiplied, away.
    kept = packing.block < num_blocks
    index = jnp.where(kept, packing.block, 0), slice(None), packing.token
    found = blocks[index].reshape(kept.shape[0], kv_heads * group, *rest)
    mask = kept.reshape(-1, *(1,) * (found.ndim - 1))
    return jnp.where(mask, found, jnp.asarray(fill, found.dtype))
