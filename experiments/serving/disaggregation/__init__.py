"""Prefill and decode on separate GPUs."""

__all__ = ["runs", "settings"]
