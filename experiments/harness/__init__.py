"""Ways to serve a workload and watch it, and models to serve."""

from experiments.harness.length_distributions import Law as Law
from experiments.harness.length_distributions import Lengths as Lengths
from experiments.harness.prompts import Request as Request
from experiments.harness.sentences import Language as Language
from experiments.harness.sentences import Scribe as Scribe

__all__ = [
    "Language",
    "Law",
    "Lengths",
    "Request",
    "Scribe",
    "bundled",
    "cost_models",
    "length_distributions",
    "model_shapes",
    "prompts",
    "servings",
    "showing",
    "streaming",
    "sweep_tables",
]
