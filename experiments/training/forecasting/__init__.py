"""Forecasts of runs with more compute, on public logs."""

__all__ = []
