"""Benchmarks against other systems."""

__all__ = [
    "decode",
    "kernels",
    "tables",
]
