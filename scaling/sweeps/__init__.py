"""Sweeps of training runs: grids, plans, executors, folders."""

from scaling.sweeps.branching import FinishedRun
from scaling.sweeps.grid import ADAMW, SweepConfig
from scaling.sweeps.workers import Workers

__all__ = [
    "ADAMW",
    "FinishedRun",
    "SweepConfig",
    "Workers",
    "branching",
    "executors",
    "family",
    "folder",
    "grid",
    "learning_rates",
    "sweep",
]
