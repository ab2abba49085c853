"""The kernels beside their peers."""

__all__ = [
    "checks",
]
