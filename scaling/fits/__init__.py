"""Fits of scaling laws to runs: optimizers, intervals, diagnostics, predictions."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.fits.diagnostics import held_out_warnings
    from scaling.fits.equal_loss import GROUP, compare, join_groups, split_groups
    from scaling.fits.fitting import bootstrap, describe_thinning, fit
    from scaling.fits.goodness import (
        CHANCE,
        f_test_p_value,
        is_far,
        measure_goodness,
        percentages,
    )
    from scaling.fits.intervals import percentile_intervals, student_t
    from scaling.fits.levenberg_marquardt import FitProblem, Objective, solve_weightings
    from scaling.fits.multistart import Solution, SolverSettings, compiled_minimize
    from scaling.fits.observations import make_observations
    from scaling.fits.prediction import (
        predict,
        predict_samples,
        run_flops,
        score,
        score_held_out,
    )
    from scaling.fits.profile import choose_pair, profile_objective
    from scaling.fits.restrictions import Restrictions
    from scaling.fits.result import FitResult, HeldOut, from_json, to_json

__all__, __getattr__, __dir__ = lazy_exports(__name__)
