"""Ways to serve a workload and watch it, and models to serve."""

from experiments.harness.length_distributions import Law as Law
from experiments.harness.length_distributions import Lengths as Lengths
from experiments.harness.prompts import Request as Request
from experiments.harness.sentences import Language as Language
from experiments.harness.sentences import Scribe as Scribe
from experiments.harness.simulated import Served as Served
from experiments.harness.simulating import part_size as part_size
from experiments.harness.simulating import stack as stack
from experiments.harness.simulating_parts import Bounds as Bounds
from experiments.harness.simulating_parts import Members as Members
from experiments.harness.simulating_parts import Part as Part

__all__ = [
    "Bounds",
    "Language",
    "Law",
    "Lengths",
    "Members",
    "Part",
    "Request",
    "Scribe",
    "Served",
    "bundled",
    "cost_models",
    "length_distributions",
    "model_shapes",
    "part_size",
    "prompts",
    "servings",
    "showing",
    "simulated",
    "simulating",
    "simulating_parts",
    "stack",
    "streaming",
    "sweep_tables",
]
