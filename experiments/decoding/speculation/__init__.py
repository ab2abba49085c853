"""Speculative decoding."""

__all__ = ["experiment", "serving"]
