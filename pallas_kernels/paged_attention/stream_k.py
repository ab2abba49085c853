"""Stream-K: the tiles of attention in one sequence, split into equal parts.

An item is one KV head of a block of packed rows; its keys are divided into tiles. The
tiles of all items form one sequence, ordered by block and head, and every program
takes an equal part, its stretch: no mix of lengths leaves a program idle. A program
that has all tiles of an item writes its result; a program that has some of them writes
a partial state. A stretch has at most two partial states: of its first and its last
item.

Source of the cut: Osama et al. 2023, arXiv:2301.03598 (Stream-K), section 4.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels import devices


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of a kernel; they change its speed and not its results.

    In a pytree it is static, part of the structure: a plan holds its own.
    """

    tile: int = 64
    """Keys of a tile, a multiple of 64."""
    stages: int = 4
    """Stages of the rings of keys and values in shared memory, one tile each."""
    q_stages: int = 2
    """Stages of the ring of queries in shared memory, one block each."""
    block_rows: int = 64
    """Largest number of packed rows of a block, 64 for each warpgroup: 64 or 128."""
    num_programs: int = devices.NUM_CORES
    """Number of programs, one for each multiprocessor."""
    min_tiles: int = 1
    """Least number of tiles of a program; with fewer tiles, some programs are idle."""

    def __post_init__(self) -> None:
        """Validates the fields."""
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
    """Returns a tiling that fills shared memory on Hopper. Not measured: derived.

    Of 227 KiB, 220 hold queries, results in flight, and the stages of keys and values,
    all but the results in 16 bits. 64 rows of 128: 2 * 16 + 32 KiB, and 4 stages of 32.
    Latent rows are keys and values at once: 72 KiB of queries, and 2 stages of 72.

    Args:
      head_dim: 64, 128 or 256, or 576 for latent rows.
      block_rows: largest number of packed rows of a block: 128 halve the reads of long
        keys that many rows share. With heads of 256 only 64 fit.
      num_programs: multiprocessors of the device; an H200 has 132.

    Returns:
      The tiling.
    """
    block_rows = 64 if head_dim > 128 else block_rows
    if head_dim > 256:
        return Tiling(stages=2, q_stages=1, num_programs=num_programs)
    q_stages = 2 if block_rows * head_dim <= 64 * 128 else 1
    free_bytes = devices.SMEM_BYTES - 7 * 1024 - q_stages * block_rows * head_dim * 2
    free_bytes -= block_rows * min(head_dim, 128) * 4
    return Tiling(
        stages=min(8, free_bytes // (2 * 64 * head_dim * 2)),
        q_stages=q_stages,
        block_rows=block_rows,
        num_programs=num_programs,
    )


class StreamKSchedule(NamedTuple):
    """The sequence of tiles and its division among programs."""

    ends: Int32[Array, " blocks"]
    """Number of tiles up to the end of each block, over all its items."""
    after: Int32[Array, " blocks"]
    """Next block that has tiles; undefined for the last."""
    begin: Int32[Array, " programs"]
    """Block with the first tile of each program, see `stretch_begin`."""


def tile_range(low: Array, high: Array, tile: int) -> tuple[Array, Array]:
    """Returns the first tile of positions in [low, high), and the number of tiles.

    Also used in kernels: for integers, or arrays of them.
    """
    size = jnp.int32(tile)
    first = lax.div(low, jnp.full_like(low, size))
    past = lax.div(high + (size - 1), jnp.full_like(high, size))
    return first, jnp.where(high > low, past - first, 0)


def stretch_begin(total: Array, program: Array, tiling: Tiling) -> Array:
    """Returns the first tile of a program's stretch; that of the next one is its end.

    The lengths of stretches differ by at most one tile, except for stretches that are
    empty because there are fewer than `tiling.min_tiles` tiles a program.
    """
    busy = _num_busy(total, tiling)
    index = jnp.minimum(program, busy)
    return index * lax.div(total, busy) + jnp.minimum(index, lax.rem(total, busy))


def item_programs(
    ends: Array | jax.Ref, block: Array, head: Array, *, kv_heads: int, tiling: Tiling
) -> tuple[Array, Array]:
    """Returns the first and the last program with tiles of an item.

    All programs in between have tiles of the item, too; 0 and -1 for an item without
    tiles. Also used in kernels, which saves a launch for the plan.

    Args:
      ends: `ends` of a `StreamKSchedule`.
      block: block of the item, or an array of blocks.
      head: KV head of the item, or an array of heads.
      kv_heads: items of each block, static.
      tiling: tiling of the schedule, static.
    """
    end = ends[block]
    before = ends[jnp.maximum(block - 1, 0)]
    begin = jnp.where(block > 0, before, 0)
    size = lax.div(end - begin, jnp.full_like(end, kv_heads))
    place = begin + size * head
    total = ends[ends.shape[0] - 1]
    first, last = (
        jnp.where(size > 0, _holder(total, x, tiling), none)
        for x, none in ((place, 0), (place + size - 1, -1))
    )
    return first, last


def all_item_programs(
    ends: Int32[Array, " blocks"], *, kv_heads: int, tiling: Tiling
) -> Int32[Array, "items 2"]:
    """Returns `item_programs` of all items, ordered by block and head."""
    item = jnp.arange(ends.shape[0] * kv_heads, dtype=jnp.int32)
    block = item // kv_heads
    head = item % kv_heads
    return jnp.stack(
        item_programs(ends, block, head, kv_heads=kv_heads, tiling=tiling), 1
    )


def _holder(total: Array, place: Array, tiling: Tiling) -> Array:
    """Returns the program of a tile of the sequence: the inverse of `stretch_begin`."""
    busy = _num_busy(total, tiling)
    size = lax.div(total, busy)
    longer = lax.rem(total, busy)
    behind = place - longer * (size + 1)
    # One of the two quotients is used; the other may have any value.
    early = lax.div(place, jnp.full_like(place, size + 1))
    late = lax.div(behind, jnp.full_like(behind, jnp.maximum(size, 1)))
    return jnp.where(behind < 0, early, longer + late)


def _num_busy(total: Array, tiling: Tiling) -> Array:
    max_programs = lax.div(total, jnp.int32(tiling.min_tiles))
    return jnp.minimum(jnp.maximum(max_programs, 1), tiling.num_programs)


def split_tiles(
    low: Int32[Array, " blocks"],
    high: Int32[Array, " blocks"],
    *,
    kv_heads: int,
    tiling: Tiling,
) -> StreamKSchedule:
    """Splits the sequence of all tiles into equal stretches.

    Sums and searches compare all with all, which XLA compiles to two kernels. The
    number of tiles must be less than 2 ** 31.

    Args:
      low: first position that a block attends to.
      high: one past the last position, at most `low` for a block without keys.
      kv_heads: items of each block, static.
      tiling: size of a tile and number of programs.

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
    # Past the end the block is unused, so the end of the last block is not compared.
    passed = (ends[None, :] <= place[:, None]) & (index < num_blocks - 1)[None, :]
    begin = jnp.sum(passed, axis=1, dtype=jnp.int32)
    return StreamKSchedule(ends, jnp.min(after, axis=1), begin)
