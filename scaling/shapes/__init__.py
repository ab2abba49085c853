"""Shapes of models: from model configs, Hugging Face folders, and papers."""

from scaling.shapes.description import HeadAttention as HeadAttention
from scaling.shapes.description import LatentAttention as LatentAttention
from scaling.shapes.description import MixtureShape as MixtureShape
from scaling.shapes.description import ModelShape as ModelShape

__all__ = [
    "HeadAttention",
    "LatentAttention",
    "MixtureShape",
    "ModelShape",
    "from_model",
    "huggingface",
    "published",
]
