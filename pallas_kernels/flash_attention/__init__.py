"""Attention over contiguous K and V, in tiles."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pallas_kernels.flash_attention.tiled import QUERY_TILE, flash_attention

__all__, __getattr__, __dir__ = lazy_exports(__name__)
