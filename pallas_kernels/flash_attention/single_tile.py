"""Attention over sequences that fit into one tile, without a loop or padding.

Computes the same function and gradient as `tiled`. The weights of the tile are kept for
the gradient instead of recomputed: at 64 tokens this, and the absence of loops, made a
prototype of a training step on a CPU up to 1.6 times as fast.

Scores are `[keys, queries]`, so that the softmax reduces over rows and its sums are
sums of vectors, and weights are not normalised: outputs and their gradients, which are
smaller, are divided by the sums instead. Each product takes its largest operand as it
is. On two CPU cores, with 64 tokens and heads of 16, the forward and backward pass take
0.8 times as long as with normalised weights as `[queries, keys]`.
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
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    # One axis for the queries of all heads of a group.
    rows = q.reshape(*q.shape[:2], -1, q.shape[-1])
    scores = product("bhkd,bhqd->bhkq", k, rows) * jnp.asarray(scale, wide)
    # As a sum, because libraries for CPUs add it while they multiply.
    bias = jnp.where(mask.T, jnp.zeros((), wide), -jnp.inf)
    scores = scores + jnp.tile(bias, (1, q.shape[2]))[None, None]
    highest = scores.max(-2, initial=-jnp.inf, keepdims=True)
    # A query without keys has zero weights, so any finite maximum is correct.
    highest = jnp.where(jnp.isneginf(highest), jnp.zeros_like(highest), highest)
    weights = jnp.exp(scores - highest)
    total = weights.sum(-2, keepdims=True)
    lse = (highest + jnp.log(total)).reshape(q.shape[:-1])
    total = jnp.where(total == 0, jnp.ones_like(total), total)
    out = product("bhkd,bhkq->bhdq", v, weights.astype(v.dtype)) / total
    shape = (*q.shape[:-1], v.shape[-1])
    results = out.swapaxes(-1, -2).reshape(shape).astype(q.dtype), lse
    return results, (q, k, v, weights, total, out)


def _backward(scale, saved, grads):
    q, k, v, weights, total, out = saved
    wide = weights.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    d_out, d_lse = grads
    rows = q.reshape(*q.shape[:2], -1, q.shape[-1])
    d_out = d_out.reshape(*rows.shape[:-1], -1).swapaxes(-1, -2).astype(wide)
    delta = jnp.sum(d_out * out, axis=-2, keepdims=True)
    delta = delta - d_lse.reshape(total.shape)
    d_out = (d_out / total).astype(q.dtype)
    d_w = product("bhkd,bhdq->bhkq", v, d_out)
    d_s = (weights * (d_w - delta / total)).astype(q.dtype)
    d_q = product("bhkd,bhkq->bhdq", k, d_s).swapaxes(-1, -2).reshape(q.shape)
    d_k = product("bhkq,bhqd->bhkd", d_s, rows)
    d_v = product("bhkq,bhdq->bhkd", weights.astype(q.dtype), d_out)
    factor = jnp.asarray(scale, wide)
    return (
        (d_q * factor).astype(q.dtype),
        (d_k * factor).astype(k.dtype),
        d_v.astype(v.dtype),
        None,
    )


attend_single_tile.defvjp(_forward, _backward)
