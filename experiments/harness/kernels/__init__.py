"""Kernels and jax's own ways on the same shapes, held against float64, to be timed."""

from experiments.harness.kernels.calls import MAX_ERROR as MAX_ERROR
from experiments.harness.kernels.calls import Implementation as Implementation
from experiments.harness.kernels.calls import KernelRun as KernelRun

__all__ = [
    "MAX_ERROR",
    "Implementation",
    "KernelRun",
    "calls",
    "runs",
]
