"""Servers as their clients see them: calibrated predictions, agent traffic."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from experiments.servers.calibration.experiment import find_measured_runs

__all__, __getattr__, __dir__ = lazy_exports(__name__)
