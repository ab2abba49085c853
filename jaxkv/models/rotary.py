"""Rotary positions: pairs of features turn with the position, each at its own pace."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkv.models.config import ModelConfig


def frequencies(config: ModelConfig, dtype: DTypeLike) -> Float[Array, " half"]:
    """Radians per position of every pair of features (Su et al. 2021, eq. 15)."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    if (s := config.rope_scaling) is None:
        return plain
    if s.kind == "linear":
        return plain / s.factor
    turns = s.original_max_positions * plain / (2 * jnp.pi)
    span = s.high_frequency_factor - s.low_frequency_factor
    keep = jnp.clip((turns - s.low_frequency_factor) / span, 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / s.factor)


def rotate(
    x: Float[Array, "*lead head_dim rows"],
    cos: Float[Array, "half rows"],
    sin: Float[Array, "half rows"],
) -> Float[Array, "*lead head_dim rows"]:
    """Turns every pair: feature i of the first half with feature i of the second."""
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=-2)
    lead = (1,) * (x.ndim - 2)
    cos, sin = (a.reshape(*lead, *a.shape) for a in (cos, sin))
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=-2).astype(x.dtype)
