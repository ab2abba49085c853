"""Attention over contiguous K and V, in tiles."""

from pallas_kernels.flash_attention.tiled import flash_attention

__all__ = [
    "flash_attention",
    "tiled",
]
