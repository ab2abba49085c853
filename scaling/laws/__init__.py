"""Scaling laws: published ones, and the functional forms of fits."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.laws.base import (
        AMOUNTS,
        AMOUNTS_FROM_0,
        Amount,
        Coordinate,
        Law,
        TwoPowers,
    )
    from scaling.laws.evaluation import (
        coefficient_slopes,
        coefficients,
        coordinates,
        slopes,
        values,
    )
    from scaling.laws.powers import CHINCHILLA
    from scaling.laws.published import (
        CONSTANTS,
        LAWS,
        Exponents,
        Optimum,
        compute_optimum,
        divide_budget,
        find_law,
        loss_powers,
        optimal_exponents,
    )
    from scaling.laws.schedules import (
        CURVE_LAWS,
        MULTI_POWER_CONSTANTS,
        CurveLaw,
        RateChanges,
        RateSchedule,
        annealing_term,
        combine_terms,
        curve_losses,
        merge_changes,
        rate_changes,
    )
    from scaling.laws.synthetic import (
        COEFFICIENTS,
        ILL_POSED,
        SOUND,
        simulate_isoflop_runs,
        simulate_runs,
        surface_loss,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
