"""Rotary positions (RoPE), and projections of attention that encode them.

Pairs of features rotate in proportion to position. In latent attention keys and values
of all heads are products of one latent per token: `expand_latent` computes them, and
`absorb_latent` moves the product of the keys to the queries, so that attention reads
the latents themselves.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxkv.models.config import AttentionKind, ModelConfig, RopeScaling
from pallas_kernels import devices


def frequencies(
    config: ModelConfig, dtype: DTypeLike, attention: AttentionKind | None = None
) -> Float[np.ndarray, " half"]:
    """Returns the rotary frequencies: radians per position of each pair of features.

    They are constants of a program, in `dtype`, float32 or float64; 0 for pairs beyond
    `rotary_size`. They are those of a kind of attention; None means the first.

    Sources: Su et al. 2021, arXiv:2104.09864, equation 15; `RopeScaling`.
    """
    attention = attention or config.attention_kinds[0]
    config = config.of_kind(attention)
    kind = np.dtype(dtype).type
    size = config.rotary_size or config.rotary_dim
    # Powers in float64 of exponents rounded as XLA rounds a division in `dtype`, for
    # equal bits.
    exponents = np.arange(0, size, 2, dtype=kind) * kind(1 / size)
    plain = (1.0 / attention.rope_theta ** exponents.astype(np.float64)).astype(kind)
    scaled = _scale_frequencies(plain, attention, size)
    return np.pad(scaled, (0, config.rotary_dim // 2 - len(scaled)))


def _scale_frequencies(
    plain: Float[np.ndarray, " half"], attention: AttentionKind, size: int
) -> Float[np.ndarray, " half"]:
    """Returns the frequencies of `size` features for longer contexts."""
    if (s := attention.rope_scaling) is None:
        return plain
    kind = plain.dtype.type
    if s.kind == "proportional":
        turns = np.arange(len(plain)) < s.num_pairs
        return np.where(turns, plain / kind(s.factor), kind(0))
    if s.kind == "linear":
        return plain / kind(s.factor)
    if s.kind == "longrope":
        return plain / np.asarray(s.factors, kind)
    if s.kind == "yarn":
        keep = _yarn_ramp(attention.rope_theta, s, size).astype(kind)
        return plain * (keep + (kind(1) - keep) / kind(s.factor))
    turns = kind(s.original_max_positions) * plain / kind(2 * np.pi)
    span = kind(s.high_frequency_factor - s.low_frequency_factor)
    keep = np.clip((turns - kind(s.low_frequency_factor)) / span, kind(0), kind(1))
    return plain * (keep + (kind(1) - keep) / kind(s.factor))


def _yarn_ramp(
    theta: float, scaling: RopeScaling, size: int
) -> Float[np.ndarray, " half"]:
    """Returns the part of each frequency that "yarn" keeps, from 1 down to 0.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2; the bounds are clipped to
    `[0, size - 1]`, as transformers and DeepSeek's models do.
    """

    def pair_of(turns: float) -> float:
        """Returns the pair with this number of turns over the original positions."""
        length = scaling.original_max_positions / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(theta))

    first = pair_of(scaling.high_frequency_factor)
    last = pair_of(scaling.low_frequency_factor)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, size - 1)
    span = last - first or 0.001
    return 1 - np.clip((np.arange((size + 1) // 2) - first) / span, 0, 1)


class LatentProjection(NamedTuple):
    """Projection of a layer with latent attention, without positions.

    Shapes are those of columns; with `axis=-1` they are `[batch, seq, heads, head_dim]`
    and `[batch, seq, width]`.
    """

    q: Float[Array, "heads head_dim rows"]
    """Queries; the last `rope_dim` features of a head are rotary."""
    latent: Float[Array, "kv_rank rows"]
    """Latents, after their norm."""
    key: Float[Array, "rope_dim rows"]
    """Rotary part of the key, the same for all heads."""
    up: Float[Array, "heads nope_and_value kv_rank"]
    """Weights from a latent to the keys of a head, and then to its values."""


class QueryProjection(NamedTuple):
    """Projection of a layer that reads K and V of another one."""

    q: Float[Array, "..."]
    """Queries of each KV head, without positions, as in a fused projection."""


type Projected = (
    Float[Array, "..."]
    | tuple[Array, Array, Array]
    | LatentProjection
    | QueryProjection
)
"""Queries, key and value of each KV head, fused or in three parts: `split_heads`; or a
projection of latent attention, or of queries alone."""


class Angles(NamedTuple):
    """Rotary angles as cosine and sine of each pair: `[half, rows]`, or transposed."""

    cos: Float[Array, "_ _"]
    sin: Float[Array, "_ _"]
    q_scale: Float[Array, " rows"] | None = None
    """Factor on each query, see `ModelConfig.score_growth`; None means 1."""


def angles(
    config: ModelConfig,
    positions: Int[Array, " rows"],
    dtype: DTypeLike,
    axis: int = -2,
    attention: AttentionKind | None = None,
) -> Angles | None:
    """Returns the rotary angles at these positions, in at least float32.

    None if positions are not rotary. The pairs of features are the first of
    the two axes, or with `axis=-1` the last. They are those of a kind of attention;
    None means the first.
    """
    attention = attention or config.attention_kinds[0]
    if attention.positions != "rope":
        return None
    wide = np.promote_types(dtype, np.float32)
    pace = frequencies(config, wide, attention)
    position = positions.astype(wide)
    turned = jnp.expand_dims(pace, -3 - axis) * jnp.expand_dims(position, axis)
    cos = jnp.cos(turned)
    sin = jnp.sin(turned)
    q_scale = None
    s = attention.rope_scaling
    if s is not None and s.magnitude != 1:
        # The pairs that do not turn are not scaled.
        scale = np.where(pace != 0, s.magnitude, 1).astype(wide)
        cos, sin = (x * jnp.expand_dims(scale, -3 - axis) for x in (cos, sin))
    if s is not None and config.score_growth is not None:
        turns = jnp.floor(position / s.original_max_positions)
        q_scale = 1 + jnp.asarray(config.score_growth, wide) * jnp.log1p(turns)
    return Angles(cos, sin, q_scale)


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
    # The gradient of a split is one concatenation, that of three slices two sums.
    q, k, v = lax.split(qkv, (group, 1, 1), axis=qkv.ndim + axis - 1)
    return q, k, v


def split_and_rotate(
    qkv: Float[Array, "kv_heads group_and_2 head_dim rows"] | LatentProjection,
    angles: Angles | None,
) -> tuple[
    Float[Array, "kv_heads group head_dim rows"],
    Float[Array, "kv_heads head_dim rows"],
    Float[Array, "kv_heads value_dim rows"],
]:
    """Splits a projection; queries and keys have rotary positions encoded."""
    if isinstance(qkv, LatentProjection):
        q, k, v = expand_latent(qkv, angles)
        return q[:, None], k, v
    q = qkv[:, :-2]
    k = qkv[:, -2]
    v = qkv[:, -1]
    if angles is not None:
        q, k = rotate_pair(q, k, angles)
    return q, k, v


def rotate_queries(
    projection: QueryProjection, angles: Angles | None, axis: int = -2
) -> Float[Array, "..."]:
    """Returns the queries with rotary positions, if any."""
    q = projection.q
    return q if angles is None else rotate(q, angles.cos, angles.sin, axis)


def rotate_pair(
    q: Float[Array, "..."], k: Float[Array, "..."], angles: Angles, axis: int = -2
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Rotates queries and keys, and scales queries by position; see `rotate`."""
    q, k = (rotate(x, angles.cos, angles.sin, axis) for x in (q, k))
    if (scale := angles.q_scale) is not None:
        shape = [1] * q.ndim
        shape[1 if axis == -1 else -1] = scale.shape[0]
        q = q * scale.reshape(shape).astype(q.dtype)
    return q, k


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


def expand_latent(
    projection: LatentProjection, angles: Angles | None, axis: int = -2
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Returns the queries, keys and values of all heads, with encoded positions.

    Without angles there are none. Results are `[heads, width, rows]`, or with `axis=-1`
    `[batch, seq, heads, width]`.
    """
    q, latent, key, up = projection
    plain, turned = _split_features(q, q.shape[axis] - key.shape[axis], axis)
    if angles is not None:
        turned, key = (rotate(x, angles.cos, angles.sin, axis) for x in (turned, key))
    # Otherwise gradients are summed over devices for each head.
    key = devices.varying_like(key, q)
    key = jnp.expand_dims(key, axis - 1)
    dims = "hdc,cr->hdr" if axis == -2 else "bsc,hdc->bshd"
    operands = (up, latent) if axis == -2 else (latent, up)
    k, v = _split_features(jnp.einsum(dims, *operands), plain.shape[axis], axis)
    k = jnp.concatenate([k, jnp.broadcast_to(key, turned.shape)], axis)
    return jnp.concatenate([plain, turned], axis), k, v


def absorb_latent(
    projection: LatentProjection, angles: Angles | None
) -> tuple[Float[Array, "rows heads width"], Float[Array, "rows 1 width"]]:
    """Returns queries, and one key of all heads, of `kv_rank + rope_dim` features.

    Their products equal those of the queries and keys of `expand_latent`, and the first
    `kv_rank` features of the key are the latent: see `expand_mean_latents`.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
    """
    q, latent, key, up = projection
    plain, turned = _split_features(q, q.shape[-2] - key.shape[-2], -2)
    plain = jnp.einsum("hdc,hdr->hcr", up[:, : plain.shape[-2]], plain)
    if angles is not None:
        turned, key = (rotate(x, angles.cos, angles.sin) for x in (turned, key))
    queries = jnp.concatenate([plain, turned], axis=-2)
    row = jnp.concatenate([latent, key])
    return queries.transpose(2, 0, 1), row.T[:, None]


def expand_mean_latents(
    projection: LatentProjection, out: Float[Array, "rows heads kv_rank"]
) -> Float[Array, "heads value_dim rows"]:
    """Returns attention's output, given its weighted means of latents."""
    num_key = projection.q.shape[-2] - projection.key.shape[-2]
    return jnp.einsum("hvc,rhc->hvr", projection.up[:, num_key:], out)


def map_row_arrays(
    function: Callable[[Array], Array], projected: Array | LatentProjection
) -> Array | LatentProjection:
    """Applies a function of arrays whose last axis has the rows to a projection."""
    if not isinstance(projected, LatentProjection):
        return function(projected)
    return LatentProjection(*map(function, projected[:-1]), projected.up)


def _split_features(x: Array, size: int, axis: int) -> tuple[Array, Array]:
    """Splits the features of an axis: the first `size`, and the remaining ones."""
    first, second = jnp.split(x, [size], axis)
    return first, second
