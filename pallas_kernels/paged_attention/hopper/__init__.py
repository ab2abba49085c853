"""Mosaic GPU attention kernels for Hopper: decode, merge, prefill."""

__all__ = [
    "decode",
    "merge",
    "merge_fused",
    "prefill",
]
