"""Command line."""

__all__ = [
    "cost",
    "plan",
    "run",
    "train",
]
