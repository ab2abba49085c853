"""Rows of groups, split into blocks of one group each.

Rows are sorted by group, so a group is a run of rows. Blocks tile every run, and one
more run of the rows that belong to no group. A program of the kernel multiplies one
block of rows by one range of columns at a time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from pallas_kernels import devices

DEPTH = 64
"""Features of a row that are multiplied at a time: 128 bytes, one line of the swizzled
layout that the tensor cores read."""
_BARRIER_BYTES = 2048
"""Shared memory reserved for barriers."""


class GroupedTiling(NamedTuple):
    """Sizes of the grouped kernel; they change its speed and not its results.

    Attributes:
      block_rows: rows of a block, 64 for each multiplying warpgroup.
      columns: columns of an item.
      stages: tiles of rows and weights in the ring in shared memory.
      panel: column ranges of a panel, the unit that concurrent programs share.
    """

    block_rows: int
    columns: int
    stages: int
    panel: int = 8

    def smem_bytes(self) -> int:
        """Returns the shared memory of rows, weights and results, without barriers.

        (128, 256, 4): 4 * 384 * 64 * 2 + 2 * 128 * 128 = 229,376.
        """
        ring = self.stages * (self.block_rows + self.columns) * DEPTH * 2
        return ring + 2 * self.block_rows * devices.LINE_BYTES


def choose_tiling(
    *, num_rows: int, num_groups: int, num_columns: int, num_cores: int
) -> GroupedTiling:
    """Chooses sizes from the shape of the product. Not measured: derived.

    Two warpgroups if groups have more than 64 rows on average, else one. Columns are
    the widest that leave an item for every multiprocessor; stages are as many as fit.

    Args:
      num_rows: rows of all groups.
      num_groups: number of groups, 1 or more.
      num_columns: columns of the result, a multiple of 64.
      num_cores: multiprocessors.
    """
    block_rows = 128 if num_rows > 64 * num_groups else 64
    min_blocks = min(num_groups, num_rows)
    num_blocks = max(min_blocks, num_rows // block_rows)
    fitting = [c for c in (256, 128, 64) if num_columns % c == 0]
    columns = next(
        (c for c in fitting if num_blocks * (num_columns // c) >= num_cores),
        fitting[-1],
    )
    for stages in (8, 7, 6, 5, 4):
        tiling = GroupedTiling(block_rows, columns, stages)
        if tiling.smem_bytes() <= devices.SMEM_BYTES - _BARRIER_BYTES:
            return tiling
    raise AssertionError("4 stages of any of these sizes fit")


class RowBlocks(NamedTuple):
    """Blocks in the order of their rows; entries from `num` on are unused."""

    group: Int32[Array, " blocks"]
    """Group of the rows; the number of groups for rows without a group."""
    first: Int32[Array, " blocks"]
    """First row of the aligned block: a multiple of `align`, at most `begin`."""
    begin: Int32[Array, " blocks"]
    """First row that belongs to the block."""
    end: Int32[Array, " blocks"]
    """One past the last row that belongs to the block."""
    num_grouped: Int32[Array, ""]
    """Number of blocks of groups, which come first."""
    num: Int32[Array, ""]
    """Number of blocks, those of rows without a group included."""


def max_row_blocks(
    *, num_rows: int, num_groups: int, block_rows: int, align: int = 1
) -> int:
    """Returns the largest number of blocks, with ungrouped rows as one more group.

    A run of n rows that starts at most align - 1 rows into its first block needs
    ceil((n + align - 1) / block_rows) blocks, and runs without rows none. 100 rows of 4
    groups in blocks of 8: (100 + 5 * 7) // 8 = 16.
    """
    num_runs = min(num_groups + 1, num_rows)
    return (num_rows + num_runs * (block_rows + align - 2)) // block_rows


def split_row_blocks(
    group_sizes: Int[Array, " groups"],
    *,
    num_rows: int,
    block_rows: int,
    align: int = 1,
) -> RowBlocks:
    """Splits rows into `max_row_blocks` blocks.

    Groups have 0 rows or more, with a sum of at most `num_rows`. A block starts at a
    multiple of `align`, which divides its length: a run starts up to align - 1 rows
    into its first block.
    """
    num_groups = group_sizes.shape[0]
    max_blocks = max_row_blocks(
        num_rows=num_rows, num_groups=num_groups, block_rows=block_rows, align=align
    )
    ends = jnp.cumsum(group_sizes.astype(jnp.int32), dtype=jnp.int32)
    ends = jnp.concatenate([ends, jnp.full((1,), num_rows, jnp.int32)])
    begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    firsts = begins // align * align
    counts = jnp.where(ends > begins, -((firsts - ends) // block_rows), 0)
    last = jnp.cumsum(counts, dtype=jnp.int32)
    block = jnp.arange(max_blocks, dtype=jnp.int32)
    # Group of each block. All runs are compared at once: a search would be a loop.
    passed = last[None, :] <= block[:, None]
    group = jnp.minimum(jnp.sum(passed, axis=1, dtype=jnp.int32), num_groups)
    nth = block - (last - counts)[group]
    first = firsts[group] + nth * block_rows
    return RowBlocks(
        group=group,
        first=first,
        begin=jnp.maximum(first, begins[group]),
        end=jnp.minimum(first + block_rows, ends[group]),
        num_grouped=last[-2],
        num=last[-1],
    )
