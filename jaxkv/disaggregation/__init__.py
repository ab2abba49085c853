"""Prompts read by some workers, answers decoded by others; pages cross over."""

from jaxkv.disaggregation.router import Lost, Router, Served

__all__ = [
    "Lost",
    "Router",
    "Served",
    "frames",
    "launch",
    "router",
    "worker",
]
