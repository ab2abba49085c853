"""Experiments that train and fit."""

__all__ = [
    "fit_coverage",
    "forecasting",
]
