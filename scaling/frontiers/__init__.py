"""Compute-optimal frontiers: isoFLOP profiles, envelopes, projections."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.frontiers.best_runs import (
        ComputeRatio,
        FrontierCurve,
        FrontierFit,
        compare_best_runs,
        evaluate_fit,
        find_best_runs,
        fit_best_runs,
        resample_fits,
    )
    from scaling.frontiers.frontier import Frontier, PowerLaw, bootstrap_frontier
    from scaling.frontiers.frontier_set import (
        CORRECTED,
        ENVELOPE,
        PARABOLA,
        FrontierSet,
        find_frontiers,
    )
    from scaling.frontiers.groups import IsoflopGroups, average_by_size, find_run_groups
    from scaling.frontiers.isoflop import (
        by_parabola,
        by_projection,
        fit_group_surface,
    )
    from scaling.frontiers.parabola import fit_parabola, vertex_shift

__all__, __getattr__, __dir__ = lazy_exports(__name__)
