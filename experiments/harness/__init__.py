"""Ways to serve a workload and watch it, and models to serve."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.harness.prompts import Request
    from experiments.harness.sentences import Language, Scribe

# Names load on first use: the command line asks for names of models, and no arrays.
_HOMES = {
    "prompts": "Request",
    "sentences": "Language Scribe",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Language",
    "Request",
    "Scribe",
    "bundled",
    "cost_models",
    "divided_steps",
    "length_distributions",
    "model_shapes",
    "named_costs",
    "prompts",
    "serving",
    "showing",
    "stepping",
    "sweep_tables",
    "timing",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
