"""Benchmarks against what a user would run instead."""

__all__ = [
    "decode",
    "kernels",
    "tables",
]
