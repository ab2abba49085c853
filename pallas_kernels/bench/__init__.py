"""Benchmark shapes, problems and timing, and compilation without a GPU."""

from pallas_kernels.bench.problems import AttentionProblem as AttentionProblem
from pallas_kernels.bench.problems import CopyProblem as CopyProblem
from pallas_kernels.bench.problems import GroupedProblem as GroupedProblem
from pallas_kernels.bench.specs import GroupedSpec as GroupedSpec
from pallas_kernels.bench.specs import HeadShape as HeadShape
from pallas_kernels.bench.specs import Spec as Spec
from pallas_kernels.bench.timing import Ceilings as Ceilings
from pallas_kernels.bench.timing import Timing as Timing

__all__ = [
    "AttentionProblem",
    "Ceilings",
    "CopyProblem",
    "GroupedProblem",
    "GroupedSpec",
    "HeadShape",
    "Spec",
    "Timing",
    "deviceless",
    "formulas",
    "launches",
    "problems",
    "sets",
    "specs",
    "timing",
]
