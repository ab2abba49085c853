"""Rotary positions: pairs of features turn with the position, each at its own pace."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig


def frequencies(config: ModelConfig, dtype: DTypeLike) -> Float[np.ndarray, " half"]:
    """Radians per position of every pair of features (Su et al. 2021, eq. 15).

    Constants of a program, not raised to powers in every step; in `dtype`, float32 or
    float64.
    """
    kind = np.dtype(dtype).type
    # Powers in float64 of what XLA makes of a division in `dtype`: its bits.
    exponents = np.arange(0, config.head_dim, 2, dtype=kind) * kind(1 / config.head_dim)
    plain = (1.0 / config.rope_theta ** exponents.astype(np.float64)).astype(kind)
    if (s := config.rope_scaling) is None:
        return plain
    if s.kind == "linear":
        return plain / kind(s.factor)
    turns = kind(s.original_max_positions) * plain / kind(2 * np.pi)
    span = kind(s.high_frequency_factor - s.low_frequency_factor)
    keep = np.clip((turns - kind(s.low_frequency_factor)) / span, kind(0), kind(1))
    return plain * (keep + (kind(1) - keep) / kind(s.factor))


class Angles(NamedTuple):
    """How far every pair of features of a row turns."""

    cos: Float[Array, "half rows"]
    sin: Float[Array, "half rows"]


def angles(
    config: ModelConfig, positions: Int[Array, " rows"], dtype: DTypeLike
) -> Angles | None:
    """The angles at these positions, at least in float32; None where none turn."""
    if config.positions != "rope":
        return None
    wide = np.promote_types(dtype, np.float32)
    turned = frequencies(config, wide)[:, None] * positions.astype(wide)[None, :]
    return Angles(jnp.cos(turned), jnp.sin(turned))


def parts(
    qkv: Float[Array, "kv_heads group_and_2 head_dim rows"], angles: Angles | None
) -> tuple[
    Float[Array, "kv_heads group head_dim rows"],
    Float[Array, "kv_heads head_dim rows"],
    Float[Array, "kv_heads head_dim rows"],
]:
    """Queries, keys and values of a projection, positions encoded in the first two."""
    q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    if angles is not None:
        q, k = rotate(q, *angles), rotate(k, *angles)
    return q, k, v


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
