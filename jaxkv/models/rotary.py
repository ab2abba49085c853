"""Rotary positions (RoPE): pairs of features rotate in proportion to position."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig


def frequencies(config: ModelConfig, dtype: DTypeLike) -> Float[np.ndarray, " half"]:
    """Returns the rotary frequencies: radians per position of each pair of features.

    They are constants of a program, in `dtype`, float32 or float64.

    Source: Su et al. 2021, arXiv:2104.09864, equation 15.
    """
    kind = np.dtype(dtype).type
    # Powers in float64 of exponents rounded as XLA rounds a division in `dtype`, for
    # equal bits.
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
    """Rotary angles as cosine and sine of each pair: `[half, rows]`, or transposed."""

    cos: Float[Array, "_ _"]
    sin: Float[Array, "_ _"]


def angles(
    config: ModelConfig,
    positions: Int[Array, " rows"],
    dtype: DTypeLike,
    axis: int = -2,
) -> Angles | None:
    """Returns the rotary angles at these positions, in at least float32.

    None if positions are not rotary. The pairs of features are the first of
    the two axes, or with `axis=-1` the last.
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
    """Splits `group + 2` heads into queries, one key and one value.

    Args:
      qkv: `[kv_heads, group + 2, head_dim, rows]`, or with `axis=-1` `[batch, seq,
        kv_heads, group + 2, head_dim]`.
      axis: axis of the features; the axis before it has the heads.
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
    """Splits a projection; queries and keys have rotary positions encoded."""
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
    """Rotates pairs of feature i of the first half and feature i of the second half.

    `x` is `[..., head_dim, rows]`, or with `axis=-1` `[batch, seq, ..., head_dim]`.
    """
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=axis)
    shape = [1] * x.ndim
    shape[axis], shape[1 if axis == -1 else -1] = cos.shape[axis], cos.shape[-3 - axis]
    cos, sin = (a.reshape(shape) for a in (cos, sin))
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=axis).astype(x.dtype)
