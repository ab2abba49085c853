"""Many training runs: grids, plans, executors, folders."""

from scaling.sweeps.grid import ADAMW as ADAMW
from scaling.sweeps.grid import SweepConfig as SweepConfig

__all__ = [
    "ADAMW",
    "SweepConfig",
    "branching",
    "executors",
    "family",
    "folder",
    "grid",
    "sweep",
]
