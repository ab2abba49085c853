"""Online softmax: from products of queries and keys to attention weights.

A score is `scale * q.k`, then `softcap * tanh(score / softcap)`, then plus
`slope * (place - position)`, then masked. The softmax is computed online, one block of
keys after another.

Sources: the cap, Gemma 2, arXiv:2408.00118, section 2; linear biases, Press et al.
2022, arXiv:2108.12409, section 3; sinks, gpt-oss, arXiv:2508.10925, section 2; the
online softmax, Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int


class ScoreTransform(NamedTuple):
    """Transform from products to scores, by query head or KV head."""

    scale: float
    """Factor on the products."""
    softcap: float | None = None
    """Bound of the scores, above 0; None means no bound."""
    slopes: Float[Array, "*heads"] | None = None
    """ALiBi slopes: factor on the key's position minus the query's; None means none."""
    sinks: Float[Array, "*heads"] | None = None
    """Score of one more key with value 0 in each head; None means none. Of states that
    will be merged only one may have it."""


class SoftmaxState(NamedTuple):
    """Running state of the online softmax of some queries."""

    top: Float[Array, "*queries"]
    """Highest score so far; the lowest finite number before the first key."""
    total: Float[Array, "*queries"]
    """Sum of exp(score - top)."""
    out: Float[Array, "*queries value_width"]
    """Sum of exp(score - top) times values."""


def init_softmax(
    shape: tuple[int, ...], value_width: int, dtype: DTypeLike
) -> SoftmaxState:
    """Returns the initial state of queries.

    `shape` is that of the queries without head_dim; the state has at least float32.
    """
    wide = np.promote_types(dtype, np.float32)
    # Not -inf: the difference of two infinities would be NaN.
    top = jnp.full(shape, jnp.finfo(wide).min, wide)
    return SoftmaxState(
        top, jnp.zeros(shape, wide), jnp.zeros((*shape, value_width), wide)
    )


def transform_scores(
    products: Float[Array, "*queries places"],
    scoring: ScoreTransform,
    *,
    slopes: Float[Array, "..."] | None,
    distance: Int[Array, "..."],
    k_scales: Float[Array, "..."] | None,
) -> Float[Array, "*queries places"]:
    """Turns products into scores, without a mask.

    Args:
      products: products of queries and keys.
      scoring: the transform.
      slopes: slopes of the transform, broadcastable to the products.
      distance: position of the key minus that of the query, broadcastable.
      k_scales: scale of each key of 8-bit pages, broadcastable.
    """
    scores = products * scoring.scale
    if k_scales is not None:
        scores = scores * k_scales.astype(scores.dtype)
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    if slopes is not None:
        scores = scores + slopes.astype(scores.dtype) * distance.astype(scores.dtype)
    return scores


def update_softmax(
    state: SoftmaxState,
    scores: Float[Array, "*queries places"],
    mask: Bool[Array, "..."] | None,
) -> tuple[Float[Array, "*queries places"], SoftmaxState]:
    """Returns the weights of a block and the state rescaled to the new maximum.

    `mask` is the mask of keys; None means that every query attends to every key.
    """
    if mask is not None:
        lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
        scores = jnp.where(mask, scores, lowest)
    top = jnp.maximum(state.top, scores.max(-1))
    weights = jnp.exp(scores - top[..., None])
    if mask is not None:
        weights = jnp.where(mask, weights, jnp.zeros((), scores.dtype))
    decay = jnp.exp(state.top - top)
    total = state.total * decay + weights.sum(-1)
    return weights, SoftmaxState(top, total, state.out * decay[..., None])


def scale_weights(
    weights: Float[Array, "*queries places"], v_scales: Float[Array, "..."] | None
) -> Float[Array, "*queries places"]:
    """Multiplies weights by the scale of each 8-bit value; 0 stays 0."""
    if v_scales is None:
        return weights
    worth = weights * v_scales.astype(weights.dtype)
    return jnp.where(weights > 0, worth, jnp.zeros((), weights.dtype))


def normalize_softmax(
    state: SoftmaxState, sinks: Float[Array, "..."] | None, dtype: DTypeLike
) -> tuple[Float[Array, "*queries value_width"], Float[Array, "*queries"]]:
    """Returns the output and the natural log-sum-exp of the final state.

    Sinks must be broadcastable to the queries.

    Returns:
      Both; 0 and -inf for queries without a key, even with a sink.
    """
    has_keys = state.total > 0
    top = state.top
    total = state.total
    out = state.out
    if sinks is not None:
        sinks = sinks.astype(top.dtype)
        top = jnp.maximum(state.top, sinks)
        decay = jnp.exp(state.top - top)
        total = total * decay + jnp.exp(sinks - top)
        out = out * decay[..., None]
    total = jnp.where(has_keys, total, jnp.ones_like(total))
    out = jnp.where(
        has_keys[..., None], out / total[..., None], jnp.zeros((), out.dtype)
    )
    lse = jnp.where(has_keys, top + jnp.log(total), -jnp.inf)
    return out.astype(dtype), lse.astype(total.dtype)
