"""Rotary positions: pairs of features turn with the position, each at its own pace."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
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


type Projected = Float[Array, "..."] | tuple[Array, Array, Array]
"""Queries, key and value of each KV head, fused or in three parts: `split_heads`."""


class Angles(NamedTuple):
    """How far every pair of features of a row turns: `[half, rows]`, or transposed."""

    cos: Float[Array, "_ _"]
    sin: Float[Array, "_ _"]


def angles(
    config: ModelConfig,
    positions: Int[Array, " rows"],
    dtype: DTypeLike,
    axis: int = -2,
) -> Angles | None:
    """Returns the angles at these positions, at least in float32.

    None where none turn. The pairs of features have the first of the two axes, or with
    `axis=-1` the last.
    """
    if config.positions != "rope":
        return None
    wide = np.promote_types(dtype, np.float32)
    pace, position = frequencies(config, wide), positions.astype(wide)
    turned = jnp.expand_dims(pace, -3 - axis) * jnp.expand_dims(position, axis)
    return Angles(jnp.cos(turned), jnp.sin(turned))


def split_heads(
    qkv: Float[Array, "..."], axis: int
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Returns the parts of `group + 2` heads: queries, one key and one value.

    Args:
      qkv: `[kv_heads, group + 2, head_dim, rows]`, or with `axis=-1` `[batch, seq,
        kv_heads, group + 2, head_dim]`.
      axis: of the features; that of the heads is the one before it.
    """
    group = qkv.shape[axis - 1] - 2
    cut = functools.partial(lax.slice_in_dim, qkv, axis=axis - 1)
    return cut(0, group), cut(group, group + 1), cut(group + 1, group + 2)


def split_and_rotate(
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
    x: Float[Array, "..."],
    cos: Float[Array, "_ _"],
    sin: Float[Array, "_ _"],
    axis: int = -2,
) -> Float[Array, "..."]:
    """Turns every pair: feature i of the first half with feature i of the second.

    `x` is `[..., head_dim, rows]`, or with `axis=-1` `[batch, seq, ..., head_dim]`.
    """
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=axis)
    shape = [1] * x.ndim
    shape[axis], shape[1 if axis == -1 else -1] = cos.shape[axis], cos.shape[-3 - axis]
    cos, sin = (a.reshape(shape) for a in (cos, sin))
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=axis).astype(x.dtype)
