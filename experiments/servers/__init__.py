"""Servers as their clients see them: calibrated predictions, agent traffic."""

__all__ = ["agents"]
