"""The attention kernels for Hopper, in Mosaic GPU: decode, its merging, prefill."""

__all__ = [
    "decode",
    "merge",
    "merge_fused",
    "prefill",
]
