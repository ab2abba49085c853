"""Decoder-only models: configuration, layers, forward passes, checkpoints."""

from typing import TYPE_CHECKING, Any

from jaxkv.models.config import Experts, LatentConfig, ModelConfig

if TYPE_CHECKING:
    from jaxkv.models.interface import Forward, ForwardResult, Params, attend

__all__ = [
    "Experts",
    "Forward",
    "ForwardResult",
    "LatentConfig",
    "ModelConfig",
    "Params",
    "attend",
    "checkpoints",
    "config",
    "huggingface",
    "interface",
    "layers",
    "moe",
    "nonlinear",
    "paged",
    "param_forms",
    "partition",
    "rotary",
    "row_parts",
    "transformer",
]


def __getattr__(name: str) -> Any:
    """Imports JAX on first use, which reading a `config.json` does not need."""
    if name not in ("Forward", "ForwardResult", "Params", "attend"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxkv.models import interface

    return getattr(interface, name)
