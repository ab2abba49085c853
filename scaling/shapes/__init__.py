"""Shapes of models: from model configs, Hugging Face folders, and papers."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.shapes.description import (
        AttentionShape,
        HeadAttention,
        LatentAttention,
        LayerSizes,
        MixtureShape,
        ModelShape,
        RecurrentShape,
    )
    from scaling.shapes.from_model import describe_config
    from scaling.shapes.huggingface import describe_huggingface, load_shape
    from scaling.shapes.published import (
        CONFIGS,
        SHAPES,
        describe,
        describe_checkpoint,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
