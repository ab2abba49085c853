"""The kernels beside their peers."""

from experiments.bench.kernels.calls import MAX_ERROR as MAX_ERROR
from experiments.bench.kernels.calls import Run as Run

__all__ = [
    "MAX_ERROR",
    "Run",
    "runs",
]
