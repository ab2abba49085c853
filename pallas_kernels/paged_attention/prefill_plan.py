"""The plan of a step's long chunks: tiles of queries, the longest first.

A tile is 128 rows of one slot, whatever the query head: its queries and results are
read and written where they lie. Packing the heads of a KV head side by side, as decode
does, reads the same keys a tile, and passes over queries and results twice more: 4,096
rows of 32 heads of 128, 134 MB. Only chunks shorter than a tile would be better off. A
tile starts at a multiple of 8 rows, which the copy engine asks for, so it may hold rows
of others: their results are not written.

The plan knows no layer, and its shapes are static.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels import devices
from pallas_kernels.devices import ROW_ALIGNMENT, WGMMA_ROWS
from pallas_kernels.paged_attention.stream_k import Tiling

TILE_ROWS = 2 * WGMMA_ROWS
"""Rows of a tile of queries: a warpgroup has half of them."""


SLOT, ROW, BEGIN, END, WHOLE, LOW, HIGH, FIRST, INNER, NUM_INNER, NUM_KV = (
    *(0, 1, 2, 3),
    *(4, 6, 7, 8, 9, 10, 11),
)
"""Lines of `Plan.tiles`; `WHOLE` has one for each half."""


class Plan(NamedTuple):
    """What the prefill kernel needs besides arrays of a layer."""

    position: Int32[Array, " padded_rows"]
    """Position of each row; -1 for padding and for rows that are left out."""
    tiles: Int32[Array, "lines tiles"]
    """Of each tile, the tiles with most keys first: its slot; the row at which it
    starts, a multiple of 8; its own rows, from one to another, not included; for each
    half of it 1 where that is its own rows only; the first place that any of its rows
    sees, and the place after the last; the first of the tiles of keys that any row
    sees; the first of those that all rows see every place of, and how many these are;
    how many tiles of keys in all, 0 where the tile has no rows."""
    tile_of: Int32[Array, " rows"]
    """Tile of each row; `tiles`, past the end, for rows that are left out."""


def num_padded(num_rows: int) -> int:
    """Rows that the queries are padded to: a tile, or a multiple of the alignment."""
    return max(TILE_ROWS, -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT)


def max_tiles(*, num_rows: int, num_slots: int, few: int) -> int:
    """Bounds the tiles that slots of more than `few` rows can fill; at least 1.

    A slot whose rows span n places fills at most (n + 7 + 127) // 128 tiles, the 7 for
    its start. 512 rows, 4 slots, few 32: (512 + 4 * 134) // 128 = 8.
    """
    used = min(num_slots, num_rows // (few + 1))
    slack = ROW_ALIGNMENT - 1 + TILE_ROWS - 1
    return max(1, (num_rows + used * slack) // TILE_ROWS)


def default_tiling(*, head_dim: int, num_programs: int = devices.NUM_CORES) -> Tiling:
    """Fills the shared memory of a Hopper multiprocessor: 224 of 227 KiB at 128.

    Unmeasured: reasoned.

    Args:
      head_dim: 64, 128 or 256.
      num_programs: multiprocessors of the device; an H200 has 132.

    Returns:
      The tiling: two stages of 128 keys; of wide heads 64 keys and one tile of queries.
    """
    return Tiling(
        tile=64 if head_dim > 128 else 128,
        stages=4 if head_dim == 64 else 2,
        q_stages=1 if head_dim > 128 else 2,
        block_rows=TILE_ROWS,
        num_programs=num_programs,
    )


def make_plan(
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"],
    *,
    num_slots: int,
    few: int,
    tiling: Tiling,
    window: int | None = None,
) -> Plan:
    """Cuts the chunks of slots with many rows into tiles; as `decode_plan.make_plan`.

    Slots of `few` rows or fewer are left out.

    Returns:
      The plan, of `max_tiles` tiles.
    """
    num_rows, keys = positions.shape[0], tiling.tile
    num_tiles = max_tiles(num_rows=num_rows, num_slots=num_slots, few=few)
    index = jnp.arange(num_rows, dtype=jnp.int32)
    owner = owners(positions, slots, num_slots=num_slots)
    own = _are_of(owner, num_slots)
    # Of each slot: its rows, first and end, and where its tiles lie among all.
    is_many = jnp.sum(own, axis=1, dtype=jnp.int32) > few
    begin = jnp.min(jnp.where(own, index[None, :], num_rows), axis=1)
    end = jnp.max(jnp.where(own, index[None, :] + 1, 0), axis=1)
    end = jnp.where(is_many, end, 0)
    start = begin - begin % ROW_ALIGNMENT
    count = jnp.maximum(end - start + TILE_ROWS - 1, 0) // TILE_ROWS
    number = jnp.arange(num_slots, dtype=jnp.int32)
    is_later = number[None, :] > number[:, None]
    ends = jnp.sum(jnp.where(is_later, 0, count[None, :]), axis=1, dtype=jnp.int32)
    is_last = number == num_slots - 1
    # Of each tile.
    number = jnp.arange(num_tiles, dtype=jnp.int32)
    # Past the end nobody looks: the last slot is not asked for its end.
    passed = (ends[None, :] <= number[:, None]) & ~is_last[None, :]
    slot = jnp.sum(passed, axis=1, dtype=jnp.int32)
    row = start[slot] + (number - ends[slot] + count[slot]) * TILE_ROWS
    begin, end = jnp.maximum(row, begin[slot]), jnp.minimum(row + TILE_ROWS, end[slot])
    row = jnp.clip(row, 0, num_padded(num_rows) - TILE_ROWS)
    own = (owner[None, :] == slot[:, None]) & (index[None, :] >= begin[:, None])
    own &= index[None, :] < end[:, None]
    is_second = index[None, :] - row[:, None] >= WGMMA_ROWS
    owned = [jnp.sum(own & x, axis=1, dtype=jnp.int32) for x in (~is_second, is_second)]
    big, positions = jnp.iinfo(jnp.int32).max, positions.astype(jnp.int32)
    lowest = jnp.min(jnp.where(own, positions[None, :], big), axis=1)
    highest = jnp.max(jnp.where(own, positions[None, :], -1), axis=1)
    spans = _spans(lowest, highest, keys=keys, window=window)
    whole = [(x == WGMMA_ROWS).astype(jnp.int32) for x in owned]
    tiles, rank = _longest_first(jnp.stack([slot, row, begin, end, *whole, *spans]))
    # Of each row.
    many = has_many(owner, num_slots=num_slots, few=few)
    held = jnp.where(many, owner, 0)
    tile_of = ends[held] - count[held] + (index - start[held]) // TILE_ROWS
    tile_of = jnp.where(many, tile_of, num_tiles)
    padding = num_padded(num_rows) - num_rows
    position = jnp.where(many, positions, -1)
    return Plan(
        position=jnp.pad(position, (0, padding), constant_values=jnp.int32(-1)),
        tiles=tiles,
        tile_of=rank.at[tile_of].get(mode="fill", fill_value=num_tiles),
    )


def _spans(
    lowest: Int32[Array, " tiles"],
    highest: Int32[Array, " tiles"],
    *,
    keys: int,
    window: int | None,
) -> list[Int32[Array, " tiles"]]:
    """Lines of `Plan.tiles` from `LOW` on: what is seen from these positions."""
    low, inner_low, high = jnp.zeros_like(highest), jnp.zeros_like(highest), highest + 1
    if window is not None:
        low = jnp.maximum(jnp.minimum(lowest, highest) - window + 1, 0)
        inner_low = jnp.maximum(high - window, 0)
    first = low // keys
    num_kv = jnp.where(high > 0, (high + keys - 1) // keys - first, 0)
    inner = (inner_low + keys - 1) // keys
    num_inner = jnp.maximum((jnp.minimum(lowest, highest) + 1) // keys - inner, 0)
    inner = jnp.where(num_inner > 0, inner, first)
    return [low, high, first, inner, num_inner, num_kv]


def _longest_first(
    tiles: Int32[Array, "lines tiles"],
) -> tuple[Int32[Array, "lines tiles"], Int32[Array, " tiles"]]:
    """Sorts tiles by their keys, by comparing all; also says where each one went."""
    num_kv, number = tiles[NUM_KV], jnp.arange(tiles.shape[1], dtype=jnp.int32)
    goes_before = num_kv[None, :] > num_kv[:, None]
    is_earlier = number[None, :] < number[:, None]
    goes_before |= (num_kv[None, :] == num_kv[:, None]) & is_earlier
    rank = jnp.sum(goes_before, axis=1, dtype=jnp.int32)
    comes_here = rank[None, None, :] == number[None, :, None]
    found = jnp.where(comes_here, tiles[:, None, :], 0)
    return jnp.sum(found, axis=2, dtype=jnp.int32), rank


def left_out(
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"],
    *,
    num_slots: int,
    few: int,
) -> Int32[Array, " rows"]:
    """Positions of the rows that `make_plan` leaves out; -1 for all others."""
    owner = owners(positions, slots, num_slots=num_slots)
    many = has_many(owner, num_slots=num_slots, few=few)
    return jnp.where(many, -1, positions).astype(jnp.int32)


def owners(
    positions: Int[Array, " rows"], slots: Int[Array, " rows"], *, num_slots: int
) -> Int32[Array, " rows"]:
    """Slot of each row; `num_slots`, past the end, for a padding row."""
    live = (positions >= 0) & (slots >= 0)
    return jnp.where(live, slots, num_slots).astype(jnp.int32)


def has_many(
    owner: Int32[Array, " rows"], *, num_slots: int, few: int
) -> Bool[Array, " rows"]:
    """Whether each row is one of more than `few` of its slot; no padding row is."""
    count = jnp.sum(_are_of(owner, num_slots), axis=1, dtype=jnp.int32)
    return count.at[owner].get(mode="fill", fill_value=0) > few


def _are_of(owner: Int32[Array, " rows"], num_slots: int) -> Bool[Array, "slots rows"]:
    """Whether each row is one of each slot: reduced in one kernel, unlike scatters."""
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    return owner[None, :] == slot[:, None]
