"""Experiments training isoflop."""

__all__ = [
    "experiment",
    "prediction",
    "settings",
]
