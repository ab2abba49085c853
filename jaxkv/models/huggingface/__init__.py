"""Hugging Face folders: configurations, tensors and weights."""

__all__ = [
    "configs",
    "families",
    "values",
    "weights",
]
