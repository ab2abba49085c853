"""Parameters, FLOPs, memory, traffic and seconds, counted from shapes."""

from scaling.costs.devices import Device as Device
from scaling.costs.flops import Attention as Attention
from scaling.costs.parallelism import Layout as Layout

__all__ = [
    "Attention",
    "Device",
    "Layout",
    "activations",
    "devices",
    "flops",
    "memory",
    "parallelism",
    "parameters",
    "residuals",
    "serving",
    "steps",
    "traffic",
]
