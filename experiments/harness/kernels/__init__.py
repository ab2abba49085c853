"""Kernels and their JAX peers on common shapes, checked against float64 and timed."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from experiments.harness.kernels.calls import MAX_ERROR, Implementation, KernelRun

__all__, __getattr__, __dir__ = lazy_exports(__name__)
