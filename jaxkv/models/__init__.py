"""Decoder-only models: configuration, layers, forward passes, checkpoints."""

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.interface import Forward, ForwardResult, Params, attend

__all__ = [
    "Experts",
    "Forward",
    "ForwardResult",
    "ModelConfig",
    "Params",
    "attend",
    "checkpoints",
    "config",
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
