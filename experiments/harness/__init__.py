"""Ways to serve a workload and watch it, and models to serve."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.harness.prompts import Request
    from experiments.harness.sentences import Language, Scribe

# Names load on first use: the command line asks for names of models, and no arrays.
_HOMES = {
    "Language": "sentences",
    "Request": "prompts",
    "Scribe": "sentences",
}

__all__ = [
    "Language",
    "Request",
    "Scribe",
    "bundled",
    "cost_models",
    "length_distributions",
    "model_shapes",
    "prompts",
    "servings",
    "showing",
    "stepping",
    "streaming",
    "sweep_tables",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
