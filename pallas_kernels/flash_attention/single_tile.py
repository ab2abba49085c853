"""Attention over sequences that fit into one tile, without a loop or padding.

Computes the same function and gradient as `tiled`. The weights of the tile are kept for
the gradient instead of recomputed: at 64 tokens this, and the absence of loops, made a
prototype of a training step on a CPU up to 1.6 times as fast.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_single_tile(
    q: Float[Array, "batch kv_heads group queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys value_width"],
    mask: Bool[Array, "queries keys"],
    scale: float,
) -> tuple[
    Float[Array, "batch kv_heads group queries value_width"],
    Float[Array, "batch kv_heads group queries"],
]:
    """Returns the output, in the type of q, and the log-sum-exp of every query.

    `mask` masks the keys of each query; a query without keys has output zero and
    log-sum-exp -inf. `scale` is the factor on the scores.
    """
    return _forward(q, k, v, mask, scale)[0]


def _forward(q, k, v, mask, scale):
    wide = np.promote_types(q.dtype, np.float32)
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=wide)
    scores = scores * jnp.asarray(scale, wide)
    scores = jnp.where(mask[None, None, None], scores, -jnp.inf)
    highest = scores.max(-1, initial=-jnp.inf)
    # A query without keys has zero weights, so any finite maximum is correct.
    highest = jnp.where(jnp.isneginf(highest), jnp.zeros_like(highest), highest)
    weights = jnp.exp(scores - highest[..., None])
    total = weights.sum(-1)
    lse = highest + jnp.log(total)
    weights = weights / jnp.where(total == 0, jnp.ones_like(total), total)[..., None]
    out = jnp.einsum(
        "bhgqk,bhkd->bhgqd", weights.astype(v.dtype), v, preferred_element_type=wide
    ).astype(q.dtype)
    return (out, lse), (q, k, v, weights, out)


def _backward(scale, saved, grads):
    q, k, v, weights, out = saved
    d_out, d_lse = grads
    wide = weights.dtype
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    d_w = jnp.einsum("bhgqd,bhkd->bhgqk", d_out, v, preferred_element_type=wide)
    d_s = (weights * (d_w - delta[..., None]) * jnp.asarray(scale, wide)).astype(
        q.dtype
    )
    d_q = jnp.einsum("bhgqk,bhkd->bhgqd", d_s, k, preferred_element_type=wide)
    d_k = jnp.einsum("bhgqk,bhgqd->bhkd", d_s, q, preferred_element_type=wide)
    d_v = jnp.einsum(
        "bhgqk,bhgqd->bhkd", weights.astype(q.dtype), d_out, preferred_element_type=wide
    )
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


attend_single_tile.defvjp(_forward, _backward)
