"""Sizes that change a kernel's speed and nothing of its meaning, per kind of device.

What no device has measured yet says so: it was reasoned out from the sizes of the chip.
"""

import itertools
from typing import Literal, NamedTuple

COPY_PART_BYTES = 32_768
"""Most that one program of the page copy moves. Unmeasured: seven programs share a
multiprocessor, 29 MB on their way on an H200, of which 4.3 TB/s at 1 us need 4.3."""

MAX_SMEM_BYTES = 232_448 - 2048
"""Shared memory of a Hopper program, less some for barriers."""

L2_BYTES = {"NVIDIA H200": 62_914_560, "NVIDIA H100 80GB HBM3": 52_428_800}
"""Last cache before memory: a cold measurement passes over several times as much."""


class DecodeSizes(NamedTuple):
    """Sizes of the decode kernel.

    Attributes:
      tile: keys that are multiplied together.
      stages: tiles of keys, and of values, in shared memory.
      q_stages: blocks of queries in shared memory.
      block_rows: packed rows of a block, 64 for each warpgroup that computes.
      source: "measured" on the device, or "reasoned" from its sizes.
    """

    tile: int
    stages: int
    q_stages: int
    block_rows: int
    source: Literal["measured", "reasoned"]

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of keys, values, queries and results, barriers aside.

        Args:
          head_dim: size of a head; numbers have 2 bytes, those of results 4.

        Returns:
          The bytes. (64, 4, 2, 64) and 128: 131,072 + 32,768 + 32,768.
        """
        kv = 2 * self.tile * self.stages * 2
        queries = self.q_stages * self.block_rows * 2
        return (kv + queries + 4 * self.block_rows) * head_dim


DECODE = {
    ("NVIDIA H200", 64): DecodeSizes(64, 8, 2, 64, "reasoned"),
    ("NVIDIA H200", 128): DecodeSizes(64, 4, 2, 64, "reasoned"),
    ("NVIDIA H200", 256): DecodeSizes(64, 2, 1, 64, "reasoned"),
}
"""By kind of device and head_dim, with 128 KiB of keys and values on their way."""

DECODE_CANDIDATES = tuple(
    sizes
    for tile, stages, q_stages, block_rows in itertools.product(
        (64, 128), (2, 3, 4, 5), (1, 2), (64, 128)
    )
    if (
        sizes := DecodeSizes(tile, stages, q_stages, block_rows, "reasoned")
    ).smem_bytes(128)
    <= MAX_SMEM_BYTES
)
"""What a device is to choose from for head_dim 128."""


def decode_sizes(kind: str, head_dim: int) -> DecodeSizes:
    """Looks up the sizes for a device, those of an H200 for one without its own.

    Args:
      kind: as the device calls itself.
      head_dim: 64, 128 or 256.

    Raises:
      ValueError: a head_dim without sizes.
    """
    for name in (kind, "NVIDIA H200"):
        if (name, head_dim) in DECODE:
            return DECODE[name, head_dim]
    raise ValueError(f"{head_dim=} must be one of {[d for _, d in DECODE]}")


GROUPED_DEPTH = 64
"""Numbers of a row that are multiplied at a time: 128 bytes, a line of the layout in
which the tensor cores read."""


class GroupedSizes(NamedTuple):
    """Sizes of the grouped matrix product.

    Attributes:
      block_rows: rows of a block, 64 for each warpgroup that multiplies.
      columns: columns of an item.
      stages: tiles of rows and weights in shared memory.
      panel: stretches of columns that programs side by side go through together.
      source: "measured" on the device, or "reasoned" from its sizes.
    """

    block_rows: int
    columns: int
    stages: int
    panel: int
    source: Literal["measured", "reasoned"]

    def smem_bytes(self) -> int:
        """Shared memory of rows, weights and results, barriers aside.

        (128, 256, 4, 8): 4 * 384 * 64 * 2 + 2 * 128 * 128 = 229,376.
        """
        ring = self.stages * (self.block_rows + self.columns) * GROUPED_DEPTH * 2
        return ring + 2 * self.block_rows * 128


def grouped_sizes(
    *, num_rows: int, num_groups: int, num_columns: int, num_cores: int
) -> GroupedSizes:
    """Chooses sizes by what there is to multiply. Unmeasured: reasoned.

    Two warpgroups where groups have more than 64 rows on average, else one. Columns as
    wide as leaves an item for every multiprocessor; then as many stages as fit.

    Args:
      num_rows: rows of all groups.
      num_groups: groups, 1 or more.
      num_columns: of the result, a multiple of 64.
      num_cores: multiprocessors.
    """
    block_rows = 128 if num_rows > 64 * num_groups else 64
    least = min(num_groups, num_rows)
    num_blocks = max(least, num_rows // block_rows)
    fitting = [c for c in (256, 128, 64) if num_columns % c == 0]
    columns = next(
        (c for c in fitting if num_blocks * (num_columns // c) >= num_cores),
        fitting[-1],
    )
    for stages in (8, 7, 6, 5, 4):
        sizes = GroupedSizes(block_rows, columns, stages, 8, "reasoned")
        if sizes.smem_bytes() <= MAX_SMEM_BYTES:
            return sizes
    raise AssertionError("4 stages of any of these sizes fit")
