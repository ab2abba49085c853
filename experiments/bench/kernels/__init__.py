"""Kernels compared with peers."""

__all__ = [
    "checks",
]
