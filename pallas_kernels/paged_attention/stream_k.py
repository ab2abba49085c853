"""The work of attention as a line of tiles, cut into equal stretches.

One KV head of a block of packed rows is an item; the keys it sees are cut into tiles.
The tiles of all items form one line, block after block and head after head, and every
program takes an equal stretch of it: no mix of lengths leaves a program idle. A program
that holds an item whole writes its result, one that holds a part of it a partial state,
of which a stretch has at most two: of the item it begins in and of the one it ends in.

Source of the cut: Osama et al. 2023, arXiv:2301.03598 (Stream-K), section 4.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels import devices


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes that change a kernel's speed and nothing of its meaning.

    In a pytree it is no leaf but part of the structure: a plan holds its own.
    """

    tile: int = 64
    """Keys that are multiplied together, a multiple of 64."""
    stages: int = 4
    """Tiles of keys, and of values, in shared memory."""
    q_stages: int = 2
    """Blocks of queries in shared memory."""
    block_rows: int = 64
    """Packed rows of a block at most, 64 a warpgroup: 64 or 128."""
    num_programs: int = devices.NUM_CORES
    """Programs, one on each of the device's multiprocessors."""
    min_tiles: int = 1
    """Fewest tiles worth a program; where there are fewer, some stay idle."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.tile < 64 or self.tile % 64:
            raise ValueError(f"{self.tile=} must be a multiple of 64")
        if self.block_rows not in (64, 128):
            raise ValueError(f"{self.block_rows=} must be 64 or 128")
        for name in ("stages", "q_stages", "num_programs", "min_tiles"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"self.{name}={getattr(self, name)} must be at least 1"
                )


def default_tiling(
    *, head_dim: int, block_rows: int = 64, num_programs: int = devices.NUM_CORES
) -> Tiling:
    """Fills the shared memory of a Hopper multiprocessor. Unmeasured: reasoned.

    Of its 227 KiB, 220 go to queries, results on their way out, and the stages of keys
    and values, all but the results in 16 bits. 64 rows of 128: 2 * 16 + 32 KiB, and 4
    stages of 32.

    Args:
      head_dim: 64, 128 or 256.
      block_rows: packed rows of a block at most: 128 read long keys that many rows
        share half as often. Of heads of 256 there is room for 64 only.
      num_programs: multiprocessors of the device; an H200 has 132.

    Returns:
      The tiling.
    """
    block_rows = 64 if head_dim > 128 else block_rows
    q_stages = 2 if block_rows * head_dim <= 64 * 128 else 1
    rest = devices.SMEM_BYTES - 7 * 1024 - q_stages * block_rows * head_dim * 2
    rest -= block_rows * min(head_dim, 128) * 4
    return Tiling(
        stages=min(8, rest // (2 * 64 * head_dim * 2)),
        q_stages=q_stages,
        block_rows=block_rows,
        num_programs=num_programs,
    )


class Schedule(NamedTuple):
    """The line of tiles and its stretches."""

    order: Int32[Array, " blocks"]
    """Blocks in the line's order: theirs, those without tiles last."""
    first_tile: Int32[Array, " blocks"]
    """First tile of each block's items, counted from place 0; in that order."""
    num_tiles: Int32[Array, " blocks"]
    """Tiles of each of them; in that order."""
    cuts: Int32[Array, " cuts"]
    """Program i holds the tiles cuts[i] to cuts[i + 1] - 1 of the line."""
    begin: Int32[Array, "programs 3"]
    """Its first tile: block, in that order; KV head; tile of the item from 0."""
    parts: Int32[Array, "items 2"]
    """Of each item the first program that holds a part of it, and how many do, one
    after the other: 0 if a program holds it whole, -1 if it has no tiles."""


def cut(
    low: Int32[Array, " blocks"],
    high: Int32[Array, " blocks"],
    *,
    kv_heads: int,
    tiling: Tiling,
) -> Schedule:
    """Cuts the line of all tiles into equal stretches.

    The stretches differ by one tile at most, but for those left empty because there
    are fewer than `tiling.min_tiles` tiles a program. In all there must be fewer than
    2 ** 31 tiles.

    Args:
      low: first place that a block sees.
      high: place after the last, equal to `low` where it sees nothing.
      kv_heads: items of each block, static.
      tiling: the size of a tile and the number of programs.

    Returns:
      The schedule.
    """
    num_blocks, programs, tile = low.shape[0], tiling.num_programs, tiling.tile
    first_tile = low // tile
    num_tiles = jnp.where(high > low, (high + tile - 1) // tile - first_tile, 0)
    # A stable partition by two sums: cheaper than a sort.
    some = num_tiles > 0
    num_some = jnp.sum(some, dtype=jnp.int32)
    rank = jnp.where(
        some,
        jnp.cumsum(some, dtype=jnp.int32) - 1,
        num_some + jnp.cumsum(~some, dtype=jnp.int32) - 1,
    )
    order = jnp.zeros((num_blocks,), jnp.int32)
    order = order.at[rank].set(jnp.arange(num_blocks, dtype=jnp.int32))
    first_tile, num_tiles = first_tile[order], num_tiles[order]
    ends = jnp.cumsum(num_tiles * kv_heads, dtype=jnp.int32)
    total = ends[-1]
    busy = jnp.clip(total // tiling.min_tiles, 1, programs)
    index = jnp.minimum(jnp.arange(programs + 1, dtype=jnp.int32), busy)
    cuts = index * (total // busy) + jnp.minimum(index, total % busy)

    def locate(place):
        """Block in order, head and tile of a place of the line."""
        passed = jnp.sum(ends[None, :] <= place[:, None], axis=1, dtype=jnp.int32)
        block = jnp.minimum(passed, num_blocks - 1)
        size = jnp.maximum(num_tiles[block], 1)
        inside = place - ends[block] + size * kv_heads
        return block, inside // size, inside % size

    begin, end = cuts[:-1], cuts[1:]
    block, head, tile_index = locate(begin)
    last_block, last_head, last_tile = locate(jnp.maximum(end - 1, 0))
    began_before = (end > begin) & (tile_index > 0)
    # The last item goes on after the stretch, and began in it: a new one is cut.
    goes_on = (last_tile + 1 < num_tiles[last_block]) & (end - 1 - last_tile >= begin)
    goes_on &= end > begin
    num_items = num_blocks * kv_heads
    item = order[last_block] * kv_heads + last_head
    begun = jnp.where(goes_on, item, num_items)
    carried = jnp.where(began_before, order[block] * kv_heads + head, num_items)
    program = jnp.arange(programs, dtype=jnp.int32)
    first = jnp.zeros((num_items,), jnp.int32).at[begun].set(program, mode="drop")
    num_parts = jnp.repeat(jnp.where(high > low, 0, -1), kv_heads)
    num_parts = num_parts.at[jnp.concatenate([begun, carried])].add(1, mode="drop")
    return Schedule(
        order=order,
        first_tile=first_tile,
        num_tiles=num_tiles,
        cuts=cuts,
        begin=jnp.stack([block, head, tile_index], axis=1),
        parts=jnp.stack([first, num_parts], axis=1),
    )
