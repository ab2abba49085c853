"""Kernels and their JAX peers on common shapes, checked against float64 and timed."""

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
