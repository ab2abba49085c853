"""The prefill plan of a step: tiles of queries, the longest first.

A tile is 128 rows of one slot and any query head, so queries are read and results
written in their own layout. Packing the heads of a KV head, as decode does, reads the
same keys for a tile, and costs two more passes over queries and results: for 4,096 rows
of 32 heads of 128, 134 MB. Packing would be better only for chunks shorter than a tile.
A tile starts at a multiple of 8 rows, the granularity of TMA, so it may hold rows of
other slots, whose results are not written.

The plan does not depend on the layer, and its shapes are static.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels import devices, row_packing
from pallas_kernels.devices import ROW_ALIGNMENT, WGMMA_ROWS
from pallas_kernels.paged_attention.stream_k import Tiling

TILE_ROWS = 2 * WGMMA_ROWS
"""Rows of a tile of queries; each warpgroup has half of them."""


SLOT, ROW, BEGIN_ROW, END_ROW, IS_FULL, _ = range(6)
LOW, HIGH, FIRST_KV, INNER, NUM_INNER, NUM_KV = range(6, 12)
"""Lines of `PrefillPlan.tiles`; `IS_FULL` has one line for each half of a tile."""

ALL_KV = NUM_KV + 1
"""Last line of `_lines_of_rows`."""


class PrefillPlan(NamedTuple):
    """Inputs of the prefill kernel that do not depend on the layer."""

    position: Int32[Array, " padded_rows"]
    """Position of each row; -1 for padding rows and rows that are not in the plan."""
    tiles: Int32[Array, "lines tiles"]
    """Lines for each tile, those with most keys first: slot; first row, a multiple of
    8; begin and end of the rows of the slot; for each half, 1 if it has rows of the
    slot only; first position that any row attends to, and one past the last; first tile
    of keys that any row attends to; first tile of keys that needs no mask, and number
    of such tiles; number of tiles of keys, 0 if the tile has no rows."""
    tile_of: Int32[Array, " rows"]
    """Tile of each row; `tiles`, one past the end, for rows not in the plan."""


def num_padded(num_rows: int) -> int:
    """Returns the padded number of query rows: at least a tile, aligned."""
    return max(TILE_ROWS, -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT)


def max_tiles(*, num_rows: int, num_slots: int, few: int) -> int:
    """Returns a bound on the tiles of slots of more than `few` rows; at least 1.

    A slot whose rows span n places fills at most (n + 7 + 127) // 128 tiles, the 7 for
    its start. 512 rows, 4 slots, few 32: (512 + 4 * 134) // 128 = 8.
    """
    used = min(num_slots, num_rows // (few + 1))
    slack = ROW_ALIGNMENT - 1 + TILE_ROWS - 1
    return max(1, (num_rows + used * slack) // TILE_ROWS)


def default_prefill_tiling(
    *, head_dim: int, num_programs: int = devices.NUM_CORES
) -> Tiling:
    """Returns a tiling that fills shared memory on Hopper: 224 of 227 KiB at 128.

    Not measured: derived.

    Args:
      head_dim: 64, 128 or 256.
      num_programs: multiprocessors of the device; an H200 has 132.

    Returns:
      The tiling: two stages of 128 keys; for wide heads 64 keys and one tile of
        queries.
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
    """Splits the chunks of slots with many rows into tiles.

    Slots of at most `few` rows are not in the plan. `runs` are the runs of these rows,
    and may count slots without a row in `positions`; None computes them. The remaining
    arguments are those of `decode_plan.plan_decode`.

    Returns:
      The plan, of `max_tiles` tiles.
    """
    num_rows = positions.shape[0]
    num_tiles = max_tiles(num_rows=num_rows, num_slots=num_slots, few=few)
    live = (positions >= 0) & (slots >= 0)
    positions = positions.astype(jnp.int32)
    if runs is None:
        runs = row_packing.find_slot_runs(slots, live)
    is_many = live & (runs.count > few)
    lines = _lines_of_rows(
        positions, slots, is_many, runs, keys=tiling.tile, window=window
    )
    # Tiles with most keys first, then in the order of rows.
    index = jnp.arange(num_rows, dtype=jnp.int32)
    is_after = (index[None, :] >= lines[BEGIN_ROW][:, None]).astype(jnp.int32)
    goes_before = lines[NUM_KV][None, :] >= lines[ALL_KV][:, None] + is_after
    rank = jnp.sum(goes_before, axis=1, dtype=jnp.int32)
    # The lines of each tile are those of its first row.
    number = jnp.arange(num_tiles, dtype=jnp.int32)
    place = jnp.where(lines[NUM_KV] > 0, rank, num_tiles)
    says = place[None, None, :] == number[None, :, None]
    tile_lines = jnp.where(says, lines[:ALL_KV, None, :], 0)
    padding = num_padded(num_rows) - num_rows
    position = jnp.where(is_many, positions, -1)
    return PrefillPlan(
        position=jnp.pad(position, (0, padding), constant_values=jnp.int32(-1)),
        tiles=jnp.sum(tile_lines, axis=2, dtype=jnp.int32),
        tile_of=jnp.where(is_many, rank, num_tiles),
    )


def _lines_of_rows(
    positions: Int32[Array, " rows"],
    slots: Int[Array, " rows"],
    is_many: Bool[Array, " rows"],
    runs: row_packing.SlotRuns,
    *,
    keys: int,
    window: int | None,
) -> Int32[Array, "lines rows"]:
    """Returns the lines of `PrefillPlan.tiles` of each row's tile, plus line `ALL_KV`.

    All rows are compared with all. `NUM_KV` is 0 except in the first row of each tile;
    `ALL_KV` has the number of tiles of keys in all rows.
    """
    num_rows = positions.shape[0]
    index = jnp.arange(num_rows, dtype=jnp.int32)
    start = runs.begin - lax.rem(runs.begin, jnp.int32(ROW_ALIGNMENT))
    cut = index - lax.rem(index - start, jnp.int32(TILE_ROWS))
    row = jnp.clip(cut, 0, num_padded(num_rows) - TILE_ROWS)
    begin = jnp.maximum(cut, runs.begin)
    end = jnp.minimum(cut + TILE_ROWS, runs.end)
    # The first row of a slot identifies a tile.
    tile = jnp.where(is_many, begin, -1)
    half = row + WGMMA_ROWS
    tile, half = lax.optimization_barrier((tile, half))
    is_same_tile = tile[None, :] == tile[:, None]
    is_second = index[None, :] >= half[:, None]
    # Both counts are packed into one sum: neither half has more than 64 rows.
    unit = jnp.where(is_second, TILE_ROWS, 1)
    big = jnp.iinfo(jnp.int32).max
    first, owned, lowest, highest = row_packing.reduce_together(
        (lax.min, num_rows, jnp.where(is_same_tile, index[None, :], num_rows)),
        (lax.add, 0, jnp.where(is_same_tile, unit, 0)),
        (lax.min, big, jnp.where(is_same_tile, positions[None, :], big)),
        (lax.max, -1, jnp.where(is_same_tile, positions[None, :], -1)),
    )
    size = jnp.int32(TILE_ROWS)
    owned = lax.rem(owned, size), lax.div(owned, size)
    is_full = [(x == WGMMA_ROWS).astype(jnp.int32) for x in owned]
    *spans, num_kv = _spans(lowest, highest, keys=keys, window=window)
    opens = is_many & (first == index)
    lines = [slots.astype(jnp.int32), row, begin, end, *is_full, *spans]
    lines += [jnp.where(opens, num_kv, 0), num_kv]
    # Selected line by line: `stack` would be one more kernel.
    number = jnp.arange(len(lines), dtype=jnp.int32)[:, None]
    line_table = lines[0][None, :]
    for i, line in enumerate(lines[1:], 1):
        line_table = jnp.where(number == i, line[None, :], line_table)
    return lax.optimization_barrier(line_table)


def _spans(
    lowest: Int32[Array, " rows"],
    highest: Int32[Array, " rows"],
    *,
    keys: int,
    window: int | None,
) -> list[Int32[Array, " rows"]]:
    """Returns the lines of `PrefillPlan.tiles` from `LOW` on, for these positions."""
    low = jnp.zeros_like(highest)
    inner_low = jnp.zeros_like(highest)
    high = highest + 1
    if window is not None:
        low = jnp.maximum(jnp.minimum(lowest, highest) - window + 1, 0)
        inner_low = jnp.maximum(high - window, 0)
    # All numbers are at least 0, so that the kernel needs no floor division.
    size = jnp.full_like(high, keys)
    first = lax.div(low, size)
    num_kv = jnp.where(high > 0, lax.div(high + (keys - 1), size) - first, 0)
    inner = lax.div(inner_low + (keys - 1), size)
    num_inner = lax.div(jnp.minimum(lowest, highest) + 1, size) - inner
    num_inner = jnp.maximum(num_inner, 0)
    inner = jnp.where(num_inner > 0, inner, first)
    return [low, high, first, inner, num_inner, num_kv]
