"""Decoder-only models: configuration, layers, forward passes, checkpoints."""

from jaxkv.models.config import Experts as Experts
from jaxkv.models.config import ModelConfig as ModelConfig
from jaxkv.models.interface import Forward as Forward
from jaxkv.models.interface import ForwardResult as ForwardResult
from jaxkv.models.interface import Params as Params
from jaxkv.models.interface import attend as attend

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
    "paged",
    "rotary",
    "transformer",
]
