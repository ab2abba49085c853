"""Fits of scaling laws to a log, as a run folder: `jaxkv fit` and sweeps."""

from experiments.fitting.config import Config as Config
from experiments.fitting.result import Result as Result

__all__ = [
    "Config",
    "Result",
    "drawing",
    "experiment",
    "fitting",
    "grids",
    "report",
]
