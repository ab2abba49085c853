"""How often intervals cover the truth."""

__all__ = [
    "surfaces",
]
