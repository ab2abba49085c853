"""Fitting laws to runs: optimisers, intervals, diagnostics, predictions."""

from scaling.fits.observations import observe as observe
from scaling.fits.result import FitResult as FitResult
from scaling.fits.result import HeldOut as HeldOut

__all__ = [
    "FitResult",
    "HeldOut",
    "diagnostics",
    "fit",
    "goodness",
    "intervals",
    "levenberg_marquardt",
    "observe",
    "prediction",
    "profile",
    "result",
]
