"""`jaxkv fit CURVES --law schedule`: laws of whole training curves."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.cli.curves.command import curve_experiment
    from scaling.cli.curves.config import CurveFitConfig, names_curve_laws
    from scaling.cli.curves.study import HELD_OUT, PREDICTED

__all__, __getattr__, __dir__ = lazy_exports(__name__)
