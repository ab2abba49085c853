"""Forecasts of larger runs: downstream accuracy, the best learning rate and batch."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.forecasts.pair_choice import (
        MEAN_PAIR,
        NEAREST_CELL,
        PAIR_CHOICES,
        PUBLISHED,
        SURFACE,
        PairScore,
        choose_pairs,
        copied_pair,
        mean_pair,
        nearest_run,
        score_pair,
    )
    from scaling.forecasts.rate_batch import (
        STEP_LAW_BATCH,
        STEP_LAW_RATE,
        PowerPair,
        RateBatchFit,
        RateBatchPrediction,
        Valley,
        fit_lowest_losses,
        fit_rate_batch,
        lost_by_miss,
        predict_rate_batch,
    )
    from scaling.forecasts.task_accuracy import (
        TaskForecasts,
        TaskPrediction,
        fit_tasks,
        predict_tasks,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
