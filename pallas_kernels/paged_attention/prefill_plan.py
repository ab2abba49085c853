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
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels import devices, row_packing
from pallas_kernels.devices import ROW_ALIGNMENT, WGMMA_ROWS
from pallas_kernels.paged_attention.stream_k import Tiling

TILE_ROWS = 2 * WGMMA_ROWS
"""Rows of a tile of queries: a warpgroup has half of them."""


SLOT, ROW, BEGIN, END, WHOLE, _ = range(6)
LOW, HIGH, FIRST, INNER, NUM_INNER, NUM_KV = range(6, 12)
"""Lines of `PrefillPlan.tiles`; `WHOLE` has one for each half."""

ALL_KV = NUM_KV + 1
"""Line of `_lines_of_rows`."""


class PrefillPlan(NamedTuple):
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


def default_prefill_tiling(
    *, head_dim: int, num_programs: int = devices.NUM_CORES
) -> Tiling:
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


def plan_prefill(
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"],
    *,
    num_slots: int,
    few: int,
    tiling: Tiling,
    window: int | None = None,
    runs: row_packing.SlotRuns | None = None,
) -> PrefillPlan:
    """Cuts the chunks of slots with many rows into tiles; as `decode_plan.plan_decode`.

    Slots of `few` rows or fewer are left out. `runs` are those of these rows, and may
    count slots of which `positions` has none; None where they are not known yet.

    Returns:
      The plan, of `max_tiles` tiles.
    """
    num_rows = positions.shape[0]
    num_tiles = max_tiles(num_rows=num_rows, num_slots=num_slots, few=few)
    live, positions = (positions >= 0) & (slots >= 0), positions.astype(jnp.int32)
    if runs is None:
        runs = row_packing.find_slot_runs(slots, live)
    many = live & (runs.count > few)
    lines = _lines_of_rows(
        positions, slots, many, runs, keys=tiling.tile, window=window
    )
    # Those with most keys first, then those of the first rows.
    index = jnp.arange(num_rows, dtype=jnp.int32)
    is_after = (index[None, :] >= lines[BEGIN][:, None]).astype(jnp.int32)
    goes_before = lines[NUM_KV][None, :] >= lines[ALL_KV][:, None] + is_after
    rank = jnp.sum(goes_before, axis=1, dtype=jnp.int32)
    # Of each tile what the first of its rows says.
    number = jnp.arange(num_tiles, dtype=jnp.int32)
    place = jnp.where(lines[NUM_KV] > 0, rank, num_tiles)
    says = place[None, None, :] == number[None, :, None]
    found = jnp.where(says, lines[:ALL_KV, None, :], 0)
    padding = num_padded(num_rows) - num_rows
    position = jnp.where(many, positions, -1)
    return PrefillPlan(
        position=jnp.pad(position, (0, padding), constant_values=jnp.int32(-1)),
        tiles=jnp.sum(found, axis=2, dtype=jnp.int32),
        tile_of=jnp.where(many, rank, num_tiles),
    )


def _lines_of_rows(
    positions: Int32[Array, " rows"],
    slots: Int[Array, " rows"],
    many: Bool[Array, " rows"],
    runs: row_packing.SlotRuns,
    *,
    keys: int,
    window: int | None,
) -> Int32[Array, "lines rows"]:
    """Lines of `PrefillPlan.tiles` of each row's tile: all rows are compared with all.

    Only the first row of each tile has its `NUM_KV`, all others have 0; line `ALL_KV`
    has it for all rows.
    """
    num_rows = positions.shape[0]
    index = jnp.arange(num_rows, dtype=jnp.int32)
    start = runs.begin - lax.rem(runs.begin, jnp.int32(ROW_ALIGNMENT))
    cut = index - lax.rem(index - start, jnp.int32(TILE_ROWS))
    row = jnp.clip(cut, 0, num_padded(num_rows) - TILE_ROWS)
    begin, end = jnp.maximum(cut, runs.begin), jnp.minimum(cut + TILE_ROWS, runs.end)
    # No two tiles begin their own rows at the same one.
    tile, half = jnp.where(many, begin, -1), row + WGMMA_ROWS
    tile, half = lax.optimization_barrier((tile, half))
    own, is_second = tile[None, :] == tile[:, None], index[None, :] >= half[:, None]
    # Rows of both halves in one sum: neither has more than 64.
    unit, big = jnp.where(is_second, TILE_ROWS, 1), jnp.iinfo(jnp.int32).max
    first, owned, lowest, highest = row_packing.reduce_together(
        (lax.min, num_rows, jnp.where(own, index[None, :], num_rows)),
        (lax.add, 0, jnp.where(own, unit, 0)),
        (lax.min, big, jnp.where(own, positions[None, :], big)),
        (lax.max, -1, jnp.where(own, positions[None, :], -1)),
    )
    size = jnp.int32(TILE_ROWS)
    owned = lax.rem(owned, size), lax.div(owned, size)
    whole = [(x == WGMMA_ROWS).astype(jnp.int32) for x in owned]
    *spans, num_kv = _spans(lowest, highest, keys=keys, window=window)
    opens = many & (first == index)
    lines = [slots.astype(jnp.int32), row, begin, end, *whole, *spans]
    lines += [jnp.where(opens, num_kv, 0), num_kv]
    # Chosen by the line: `stack` would be a kernel besides that of its operands.
    number = jnp.arange(len(lines), dtype=jnp.int32)[:, None]
    found = lines[0][None, :]
    for i, line in enumerate(lines[1:], 1):
        found = jnp.where(number == i, line[None, :], found)
    return lax.optimization_barrier(found)


def _spans(
    lowest: Int32[Array, " rows"],
    highest: Int32[Array, " rows"],
    *,
    keys: int,
    window: int | None,
) -> list[Int32[Array, " rows"]]:
    """Lines of `PrefillPlan.tiles` from `LOW` on: what is seen from these positions."""
    low, inner_low, high = jnp.zeros_like(highest), jnp.zeros_like(highest), highest + 1
    if window is not None:
        low = jnp.maximum(jnp.minimum(lowest, highest) - window + 1, 0)
        inner_low = jnp.maximum(high - window, 0)
    # Of numbers of at least 0, which spares the kernel the roundings of others.
    size = jnp.full_like(high, keys)
    first = lax.div(low, size)
    num_kv = jnp.where(high > 0, lax.div(high + (keys - 1), size) - first, 0)
    inner = lax.div(inner_low + (keys - 1), size)
    num_inner = lax.div(jnp.minimum(lowest, highest) + 1, size) - inner
    num_inner = jnp.maximum(num_inner, 0)
    inner = jnp.where(num_inner > 0, inner, first)
    return [low, high, first, inner, num_inner, num_kv]
