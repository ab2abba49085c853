"""The command line."""

__all__ = [
    "cost",
    "fit",
    "plan",
    "train",
]
