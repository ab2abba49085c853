"""Optimizers: from gradients to updates for a learning rate of one.

The only module that imports optax. A step multiplies the updates by its learning rate,
so the rate is an array and its values do not recompile.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxkv import validation
from scaling.training.recipes import OptimizerConfig


@validation.checks_numbers(hidden_rate="(0, 1e30]")
def make_optimizer(
    config: OptimizerConfig, hidden_rate: float = 1.0
) -> optax.GradientTransformation:
    """Builds an optimizer for a learning rate of one.

    Weight decay is decoupled: Loshchilov & Hutter 2017, arXiv:1711.05101.

    Args:
      config: the optimizer.
      hidden_rate: factor on the updates of the layers' matrices before weight decay;
        other than 1 for AdamW only, see `TrainConfig.parametrization`.
    """
    if config.kind == "muon":
        direction = optax.contrib.muon(
            learning_rate=1.0,
            beta=config.momentum,
            weight_decay=config.weight_decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_muon_axes,
            # Updates have the RMS of AdamW's, so that one learning rate suits both: Liu
            # et
            # al. 2025, arXiv:2502.16982, section 2.2.
            consistent_rms=0.2,
        )
    else:
        are_matrices = functools.partial(jax.tree.map_with_path, is_layer_matrix)
        rules = [*_DIRECTIONS[config.kind](config)]
        if hidden_rate != 1:
            rules.append(optax.masked(optax.scale(hidden_rate), are_matrices))
        direction = optax.chain(
            *rules,
            optax.add_decayed_weights(config.weight_decay, mask=are_matrices),
            optax.scale(-1.0),
        )
    parts = [direction]
    if math.isfinite(config.max_grad_norm):
        parts.insert(0, optax.clip_by_global_norm(config.max_grad_norm))
    optimizer = optax.chain(*parts)

    def update(updates, state, params=None):
        # optax mixes integers and floats, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


_MIN_FACTORED = 16
"""Smallest side of a matrix with factored mean squares; optax's own 128 would factor
no matrix of small models."""

_DIRECTIONS: Mapping[
    str, Callable[[OptimizerConfig], tuple[optax.GradientTransformation, ...]]
] = {
    "adamw": lambda x: (optax.scale_by_adam(b1=x.beta1, b2=x.beta2),),
    "sgd": lambda x: (optax.trace(decay=x.momentum),),
    # Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    "lion": lambda x: (optax.scale_by_lion(b1=x.beta1, b2=x.beta2),),
    # Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4, without relative steps.
    "adafactor": lambda x: (
        optax.scale_by_factored_rms(min_dim_size_to_factor=_MIN_FACTORED),
        optax.clip_by_block_rms(1.0),
    ),
}
"""Update rules before weight decay, by the kind of optimizer."""


def is_layer_matrix(path: Sequence[Any], leaf: object) -> bool:
    """Returns True for a matrix of a layer: not an embedding, scale or bias."""
    return path[0].key in ("layers", "ahead") and path[-1].key == "weight"


def _muon_axes(params):
    """Returns the axes of matrices for Muon: the last maps to the one before it.

    Earlier axes count separate matrices: query, key and value of each head, gate and up
    projection.
    """
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    return jax.tree.map_with_path(
        lambda path, p: axes if is_layer_matrix(path, p) else None, params
    )
