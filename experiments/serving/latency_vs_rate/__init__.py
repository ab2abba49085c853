"""Latency by load of systems with different KV cache allocation."""

__all__ = ["drawings", "published", "runs", "settings"]
