"""Speculative decoding."""

__all__ = ["experiment", "on_text", "serving"]
