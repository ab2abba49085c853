"""Benchmark shapes, problems and timing, and compilation without a GPU."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pallas_kernels.bench.deviceless import (
        compile_function,
        load_compiler,
        unavailable_reason,
    )
    from pallas_kernels.bench.formulas import attention, in_float64
    from pallas_kernels.bench.launches import (
        LOOPS,
        Route,
        Thunk,
        executed_launches,
        read_plan,
        walk_thunks,
    )
    from pallas_kernels.bench.problems import (
        FEATURES,
        AttentionProblem,
        CopyProblem,
        GroupedProblem,
        make_attention,
        make_problem,
    )
    from pallas_kernels.bench.sets import SETS
    from pallas_kernels.bench.specs import TINY, GroupedSpec, HeadShape, Spec
    from pallas_kernels.bench.timing import (
        Ceilings,
        Timing,
        measure,
        measure_ceilings,
        measure_empty,
        num_turns,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
