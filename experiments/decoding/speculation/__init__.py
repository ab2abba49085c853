"""Speculative decoding."""

__all__ = ["experiment", "held_out", "on_text", "serving"]
