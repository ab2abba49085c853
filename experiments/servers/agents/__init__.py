"""Agent sessions under several orders of the queue."""

__all__ = ["load"]
