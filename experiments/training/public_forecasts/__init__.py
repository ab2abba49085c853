"""Forecasts of accuracy, learning rate and batch, scored on public runs."""

__all__ = []
