"""The attention kernels for Hopper, in Mosaic GPU: decode and prefill."""

__all__ = [
    "decode",
    "prefill",
]
