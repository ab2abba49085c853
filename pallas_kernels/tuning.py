"""Sizes that change a kernel's speed and nothing of its meaning, per kind of device.

What no device has measured yet says so: it was reasoned out from the sizes of the chip.
"""

from typing import Literal, NamedTuple

COPY_PART_BYTES = 32_768
"""Most that one program of the page copy moves. Unmeasured: seven programs share a
multiprocessor, 29 MB on their way on an H200, of which 4.3 TB/s at 1 us need 4.3."""

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

    @property
    def kv_bytes(self) -> int:
        """Shared memory of keys and values for each element of a head, 2 bytes wide."""
        return 2 * 2 * self.tile * self.stages


DECODE = {
    ("NVIDIA H200", 64): DecodeSizes(64, 8, 2, 64, "reasoned"),
    ("NVIDIA H200", 128): DecodeSizes(64, 4, 2, 64, "reasoned"),
    ("NVIDIA H200", 256): DecodeSizes(64, 2, 1, 64, "reasoned"),
}
"""By kind of device and head_dim: 128 KiB of keys and values are in flight."""

DECODE_CANDIDATES = tuple(
    DecodeSizes(tile, stages, 2, block_rows, "reasoned")
    for tile, most in ((64, 6), (128, 3))
    for stages in range(most // 2, most + 1)
    for block_rows in (64, 128)
)
"""What a device is to choose from for head_dim 128, in the order of trying."""


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
