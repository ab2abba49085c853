"""Optimizers: gradients in, updates for a learning rate of one out.

The only door to optax. A step multiplies the updates by its learning rate,
so the rate is an array and no value of it compiles anew.
"""

import math

import jax
import optax

from scaling.training.recipes import OptimizerConfig


def make(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds an optimizer for a learning rate of one.

    Weight decay is decoupled: Loshchilov & Hutter 2017, arXiv:1711.05101.
    """
    parts = [_MAKERS[config.kind](config)]
    if math.isfinite(config.max_grad_norm):
        parts.insert(0, optax.clip_by_global_norm(config.max_grad_norm))
    whole = optax.chain(*parts)

    def update(updates, state, params=None):
        # optax mixes integers and floats, which a strict caller would forbid.
        with jax.numpy_dtype_promotion("standard"):
            return whole.update(updates, state, params)

    return optax.GradientTransformation(whole.init, update)


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return _decayed(config, optax.scale_by_adam(b1=config.beta1, b2=config.beta2))


def _sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    return _decayed(config, optax.trace(decay=config.momentum))


def _lion(config: OptimizerConfig) -> optax.GradientTransformation:
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2."""
    return _decayed(config, optax.scale_by_lion(b1=config.beta1, b2=config.beta2))


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4, without relative steps."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=_MIN_FACTORED)
    return _decayed(config, factored, optax.clip_by_block_rms(1.0))


_MIN_FACTORED = 16
"""Smallest side of a matrix whose mean squares are kept as a product; optax's own 128
would factor nothing of the small models."""


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.contrib.muon(
        learning_rate=1.0,
        beta=config.momentum,
        weight_decay=config.weight_decay,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers=_muon_axes,
        # Updates as large as AdamW's, so that one learning rate suits both: Liu et
        # al. 2025, arXiv:2502.16982, section 2.2.
        consistent_rms=0.2,
    )


_MAKERS = {
    "muon": _muon,
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "lion": _lion,
}


def _decayed(
    config: OptimizerConfig, *parts: optax.GradientTransformation
) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(config.weight_decay, mask=_are_matrices)
    return optax.chain(*parts, decay, optax.scale(-1.0))


def _is_matrix(path, _) -> bool:
    """Whether a parameter is a matrix of a layer: not an embedding, scale or bias."""
    return path[0].key == "layers" and path[-1].key == "weight"


def _are_matrices(params):
    return jax.tree.map_with_path(_is_matrix, params)


def _muon_axes(params):
    """Says which axes are a matrix: the last is mapped to the one before it.

    Axes before those count separate matrices: each head's query, key and value, the
    gate and the up projection.
    """
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    return jax.tree.map_with_path(
        lambda path, p: axes if _is_matrix(path, p) else None, params
    )
