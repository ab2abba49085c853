"""Experiments serving chunked prefill."""

__all__ = [
    "policies",
]
