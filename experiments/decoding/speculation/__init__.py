"""Speculative decoding."""

__all__ = ["drawing", "experiment", "held_out", "on_text", "serving"]
