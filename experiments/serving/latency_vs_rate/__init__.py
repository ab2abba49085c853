"""Load and latency of systems that keep keys and values in different ways."""

__all__ = ["published", "runs", "settings"]
