"""Sweeps of training runs: grids, plans, executors, folders."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.sweeps.branching import FinishedRun
    from scaling.sweeps.coordinates import (
        MAX_SLOPE,
        CoordinateCheck,
        measure_coordinates,
        widen_model,
    )
    from scaling.sweeps.executors import make_record, open_on_device, score_run
    from scaling.sweeps.family import (
        BASE_WIDTH,
        ISOFLOP,
        SWEEPS,
        TRAININGS,
        FamilySweep,
        family_shape,
        make_sweep,
        nearest_shape,
    )
    from scaling.sweeps.folder import RecordRow, shared_shape
    from scaling.sweeps.grid import (
        ADAMW,
        Cell,
        Lane,
        SweepConfig,
        count_cost,
        train_config,
    )
    from scaling.sweeps.learning_rates import (
        RatePowers,
        extrapolate,
        fit_powers,
        next_rate,
        optimal_rates,
    )
    from scaling.sweeps.progress import format_best_loss, run_logged_sweep
    from scaling.sweeps.sequential import (
        SweepCandidate,
        TrainSweep,
        list_candidates,
        train_in_sequence,
    )
    from scaling.sweeps.sweep import SweepOutcome, run_model_folder, run_sweep
    from scaling.sweeps.workers import Workers

__all__, __getattr__, __dir__ = lazy_exports(__name__)
