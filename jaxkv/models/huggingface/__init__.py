"""Hugging Face folders: their configurations, tensors and weights."""

__all__ = [
    "configs",
    "families",
    "values",
    "weights",
]
