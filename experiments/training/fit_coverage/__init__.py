"""Experiments training fit coverage."""

__all__ = [
    "surfaces",
]
