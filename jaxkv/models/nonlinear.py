"""Norms and activations, by their names in `ModelConfig`.

Serving arranges activations as columns and training as rows; both use these functions,
with the axis of the features as an argument.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv.models.config import ModelConfig


class NormKind(NamedTuple):
    """Arithmetic of a norm between its input and its scale."""

    standardise: Callable[[Array, int, float], Array]
    """`standardise(x, axis, eps)` for numbers that are at least float32."""
    has_bias: bool
    """True if a bias is added after the scale."""


def norm(
    x: Float[Array, "..."],
    scale: Float[Array, " size"],
    bias: Float[Array, " size"] | None = None,
    *,
    kind: str,
    eps: float,
    axis: int = -1,
) -> Float[Array, "..."]:
    """Standardises `x` along an axis, in float32 at least, then scales and shifts it.

    Args:
      x: activations.
      scale: one factor for each feature.
      bias: one summand for each feature; None adds zero.
      kind: a name in `NORMS`.
      eps: added to the mean of squares.
      axis: axis of the features, counted from the end.
    """
    along = functools.partial(
        jnp.reshape, shape=(1,) * (x.ndim + axis) + (-1,) + (1,) * (-axis - 1)
    )
    y = x.astype(np.promote_types(x.dtype, np.float32))
    y = NORMS[kind].standardise(y, axis, eps).astype(x.dtype) * along(scale)
    return y if bias is None else y + along(bias)


def activate(
    config: ModelConfig, hidden: Float[Array, "..."], axis: int
) -> Float[Array, "..."]:
    """Applies the activation and gate of an MLP to the output of its first projection.

    Args:
      config: names the activation, and if the MLP is gated.
      hidden: gate and projection concatenated along `axis`, or the projection.
      axis: axis of the features.
    """
    gate, *up = jnp.split(hidden, 1 + config.gated, axis)
    active = ACTIVATIONS[config.activation](gate)
    return active * up[0] if config.gated else active


def _rms(x: Array, axis: int, eps: float) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(axis, keepdims=True) + eps)


def _layer(x: Array, axis: int, eps: float) -> Array:
    return _rms(x - x.mean(axis, keepdims=True), axis, eps)


NORMS: Mapping[str, NormKind] = {
    "rms": NormKind(_rms, has_bias=False),
    "layer": NormKind(_layer, has_bias=True),
}
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
