"""The work of attention as a line of tiles, cut into equal stretches.

One KV head of a block of packed rows is an item; the keys it sees are cut into tiles.
The tiles of all items form one line, block after block and head after head, and every
program takes an equal stretch of it: no mix of lengths leaves a program idle. A program
that holds an item whole writes its result, one that holds a part of it a partial state,
of which a stretch has at most two: of the item it begins in and of the one it ends in.

Source of the cut: Osama et al. 2023, arXiv:2301.03598 (Stream-K), section 4.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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
            raise ValueError(f"tile={self.tile} must be a multiple of 64")
        if self.block_rows not in (64, 128):
            raise ValueError(f"block_rows={self.block_rows} must be 64 or 128")
        for name in ("stages", "q_stages", "num_programs", "min_tiles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def default_decode_tiling(
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


class StreamKSchedule(NamedTuple):
    """The line of tiles and its stretches."""

    ends: Int32[Array, " blocks"]
    """Tiles of the line up to the end of each block, those of all its items."""
    after: Int32[Array, " blocks"]
    """The block with tiles that comes next; any where none does."""
    begin: Int32[Array, " programs"]
    """Block with the first tile of each program's stretch, see `stretch_begin`."""


def tile_range(low: Any, high: Any, tile: int) -> tuple[Any, Any]:
    """First tile of the places from `low` to `high`, and how many there are.

    Also in kernels: any integers, or arrays of them.
    """
    size = jnp.int32(tile)
    first = lax.div(low, jnp.full_like(low, size))
    past = lax.div(high + (size - 1), jnp.full_like(high, size))
    return first, jnp.where(high > low, past - first, 0)


def stretch_begin(total: Any, program: Any, tiling: Tiling) -> Any:
    """First place in the line of a program's stretch; the next one's is its end.

    The stretches differ by one tile at most, but for those left empty because there
    are fewer than `tiling.min_tiles` tiles a program.
    """
    busy = _num_busy(total, tiling)
    index = jnp.minimum(program, busy)
    return index * lax.div(total, busy) + jnp.minimum(index, lax.rem(total, busy))


def item_programs(
    ends: Any, block: Any, head: Any, *, kv_heads: int, tiling: Tiling
) -> tuple[Any, Any]:
    """First and last program that hold a part of an item.

    They hold it one after the other, or are the same if one holds it whole; 0 and -1 of
    an item without tiles. Also in kernels, which spares the plan a launch.

    Args:
      ends: those of a `StreamKSchedule`.
      block: of the item; or of many, an array.
      head: likewise, the KV head.
      kv_heads: items of each block, static.
      tiling: that of the schedule, static.
    """
    end, before = ends[block], ends[jnp.maximum(block - 1, 0)]
    begin = jnp.where(block > 0, before, 0)
    size = lax.div(end - begin, jnp.full_like(end, kv_heads))
    place, total = begin + size * head, ends[ends.shape[0] - 1]
    first, last = (
        jnp.where(size > 0, _holder(total, x, tiling), none)
        for x, none in ((place, 0), (place + size - 1, -1))
    )
    return first, last


def all_item_programs(
    ends: Int32[Array, " blocks"], *, kv_heads: int, tiling: Tiling
) -> Int32[Array, "items 2"]:
    """`item_programs` of all items: of every head of a block, block after block."""
    item = jnp.arange(ends.shape[0] * kv_heads, dtype=jnp.int32)
    block, head = item // kv_heads, item % kv_heads
    return jnp.stack(
        item_programs(ends, block, head, kv_heads=kv_heads, tiling=tiling), 1
    )


def _holder(total: Any, place: Any, tiling: Tiling) -> Any:
    """Program that holds a place of the line: the inverse of `stretch_begin`."""
    busy = _num_busy(total, tiling)
    size, longer = lax.div(total, busy), lax.rem(total, busy)
    behind = place - longer * (size + 1)
    # Of two quotients one is asked for; the other may be any.
    early = lax.div(place, jnp.full_like(place, size + 1))
    late = lax.div(behind, jnp.full_like(behind, jnp.maximum(size, 1)))
    return jnp.where(behind < 0, early, longer + late)


def _num_busy(total: Any, tiling: Tiling) -> Any:
    most = lax.div(total, jnp.int32(tiling.min_tiles))
    return jnp.minimum(jnp.maximum(most, 1), tiling.num_programs)


def split_tiles(
    low: Int32[Array, " blocks"],
    high: Int32[Array, " blocks"],
    *,
    kv_heads: int,
    tiling: Tiling,
) -> StreamKSchedule:
    """Cuts the line of all tiles into equal stretches.

    Sums and searches compare all with all, of which XLA makes two kernels. In all
    there must be fewer than 2 ** 31 tiles.

    Args:
      low: first place that a block sees.
      high: place after the last, at most `low` where it sees nothing.
      kv_heads: items of each block, static.
      tiling: the size of a tile and the number of programs.

    Returns:
      The schedule.
    """
    num_blocks = low.shape[0]
    _, size = tile_range(low, high, tiling.tile)
    index = jnp.arange(num_blocks, dtype=jnp.int32)
    is_later = index[None, :] > index[:, None]
    ends = jnp.where(is_later, 0, size[None, :] * kv_heads)
    ends = jnp.sum(ends, axis=1, dtype=jnp.int32)
    after = jnp.where(is_later & (size > 0)[None, :], index[None, :], num_blocks - 1)
    total = ends[-1]
    program = jnp.arange(tiling.num_programs, dtype=jnp.int32)
    place = stretch_begin(total, program, tiling)
    # Past the end nobody looks: the last block is not asked for its end.
    passed = (ends[None, :] <= place[:, None]) & (index < num_blocks - 1)[None, :]
    begin = jnp.sum(passed, axis=1, dtype=jnp.int32)
    return StreamKSchedule(ends, jnp.min(after, axis=1), begin)
