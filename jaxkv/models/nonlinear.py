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
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkv.models.config import ModelConfig


class NormKind(NamedTuple):
    """Arithmetic of a norm between its input and its scale."""

    standardise: Callable[[Array, int, float], Array]
    """`standardise(x, axis, eps)` for numbers that are at least float32."""
    has_bias: bool = False
    """True if a bias is added after the scale."""
    has_scale: bool = True
    """False if the norm has no weights."""
    offset: float = 0.0
    """Added to the weights, in float32 at least, before they scale."""


def norm(
    x: Float[Array, "..."],
    scale: Float[Array, " size"] | None,
    bias: Float[Array, " size"] | None = None,
    *,
    kind: str,
    eps: float,
    axis: int = -1,
) -> Float[Array, "..."]:
    """Standardises `x` along an axis, in float32 at least, then scales and shifts it.

    Args:
      x: activations.
      scale: one weight for each feature; None for a norm without weights.
      bias: one summand for each feature; None adds zero.
      kind: a name in `NORMS`.
      eps: added to the mean of squares.
      axis: axis of the features, counted from the end.
    """
    along = functools.partial(
        jnp.reshape, shape=(1,) * (x.ndim + axis) + (-1,) + (1,) * (-axis - 1)
    )
    y = x.astype(np.promote_types(x.dtype, np.float32))
    y = NORMS[kind].standardise(y, axis, eps)
    return scale_norm(y, scale, bias, kind=kind, dtype=x.dtype, along=along)


def scale_norm(
    y: Float[Array, "..."],
    scale: Float[Array, "*size"] | None,
    bias: Float[Array, "*size"] | None = None,
    *,
    kind: str,
    dtype: DTypeLike,
    along: Callable[[Array], Array],
) -> Float[Array, "..."]:
    """Scales and shifts standardised numbers, and casts them to `dtype`.

    `along` gives a vector the shape that broadcasts along the features.
    """
    offset = NORMS[kind].offset
    if offset:
        assert scale is not None
        return (y * (offset + along(scale).astype(y.dtype))).astype(dtype)
    y = y.astype(dtype)
    if scale is not None:
        y = y * along(scale)
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
    if config.activation == "clamped_swiglu":
        limit = config.activation_limit
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up[0], -limit, limit) + 1
        return up * gate * jax.nn.sigmoid(gate * config.activation_slope)
    active = ACTIVATIONS[config.activation](gate)
    return active * up[0] if config.gated else active


def _rms(x: Array, axis: int, eps: float) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(axis, keepdims=True) + eps)


def _layer(x: Array, axis: int, eps: float) -> Array:
    return _rms(x - x.mean(axis, keepdims=True), axis, eps)


def _square(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


NORMS: Mapping[str, NormKind] = {
    "rms": NormKind(_rms),
    "layer": NormKind(_layer, has_bias=True),
    "rms_offset": NormKind(_rms, offset=1.0),
    "rms_plain": NormKind(_rms, has_scale=False),
}
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": _square,
}
