"""Many training runs: grids, plans, executors, folders."""

from scaling.sweeps.branching import Finished as Finished
from scaling.sweeps.grid import ADAMW as ADAMW
from scaling.sweeps.grid import SweepConfig as SweepConfig
from scaling.sweeps.workers import Workers as Workers

__all__ = [
    "ADAMW",
    "Finished",
    "SweepConfig",
    "Workers",
    "branching",
    "executors",
    "family",
    "folder",
    "grid",
    "learning_rates",
    "sweep",
    "workers",
]
