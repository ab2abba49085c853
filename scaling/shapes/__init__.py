"""Shapes of models: from a configuration, a folder, a paper."""

from scaling.shapes.description import Description as Description
from scaling.shapes.description import Experts as Experts
from scaling.shapes.description import HeadAttention as HeadAttention
from scaling.shapes.description import LatentAttention as LatentAttention

__all__ = [
    "Description",
    "Experts",
    "HeadAttention",
    "LatentAttention",
    "from_model",
    "huggingface",
    "published",
]
