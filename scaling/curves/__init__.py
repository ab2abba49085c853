"""Whole training curves: fits under a schedule of the learning rate, best schedules."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.curves.curve_fits import (
        CurveFit,
        CurvePrediction,
        constant_baseline,
        fit_curves,
        predict_curve,
        ratio_baseline,
    )
    from scaling.curves.rate_schedules import (
        BestSchedule,
        ScheduleFrame,
        best_schedule,
        cosine_schedule,
        wsd_schedule,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
