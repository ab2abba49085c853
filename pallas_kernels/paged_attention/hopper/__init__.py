"""Mosaic GPU attention kernels for Hopper: decode, merge, prefill."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.hopper.decode import (
        attend_decode,
        partial_states,
    )
    from pallas_kernels.paged_attention.hopper.merge import merge_and_unpack_mosaic_gpu
    from pallas_kernels.paged_attention.hopper.merge_fused import (
        DecodePartials,
        supports_fused_merge,
    )
    from pallas_kernels.paged_attention.hopper.prefill import attend_prefill

__all__, __getattr__, __dir__ = lazy_exports(__name__)
