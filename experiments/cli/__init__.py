"""The command line."""

__all__ = [
    "cost",
    "plan",
    "train",
]
