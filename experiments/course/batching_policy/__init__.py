"""Assignment: a policy of continuous batching, served in the simulator."""

__all__ = ["checks"]
