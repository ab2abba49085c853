"""Fits of scaling laws to runs: optimizers, intervals, diagnostics, predictions."""

from scaling.fits.observations import make_observations as make_observations
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
    "make_observations",
    "prediction",
    "profile",
    "result",
]
