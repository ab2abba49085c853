"""Scaling laws: costs, fits, training runs, sweeps and compute-optimal budgets."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling import calibration as calibration
    from scaling import cli as cli
    from scaling import corpora as corpora
    from scaling import costs as costs
    from scaling import curves as curves
    from scaling import fits as fits
    from scaling import forecasts as forecasts
    from scaling import frontiers as frontiers
    from scaling import laws as laws
    from scaling import logs as logs
    from scaling import plan as plan
    from scaling import policy as policy
    from scaling import shapes as shapes
    from scaling import sweeps as sweeps
    from scaling import training as training

__all__, __getattr__, __dir__ = lazy_exports(__name__)
