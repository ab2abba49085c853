"""Attention over whole sequences as its formula has it, with inputs to try."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def plain(q: Any, k: Any, v: Any, *, causal: bool, window: int | None) -> Any:
    """Softmax written out: output and log-sum-exp."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(
        q.shape[3] ** -0.5, q.dtype
    )
    query = jnp.arange(q.shape[1], dtype=jnp.int32)[:, None] + (k.shape[1] - q.shape[1])
    key = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    if causal:
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        lowest = jnp.asarray(-jnp.inf, q.dtype)
        scores = jnp.where(seen[None, None], scores, lowest)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(0, 2, 1)


def draw(
    queries: int, keys: int, q_heads: int, kv_heads: int, head_dim: int, dtype: Any
) -> tuple[Any, ...]:
    rng = np.random.default_rng(queries + keys)
    shapes = [
        (2, queries, q_heads, head_dim),
        *[(2, keys, kv_heads, head_dim)] * 2,
    ]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def in_float64(f: Any, *arrays: Any) -> Any:
    with jax.enable_x64(True):
        return f(*(jnp.asarray(np.asarray(x, np.float64)) for x in arrays))


def total(attend: Any, *arrays: Any) -> Any:
    """A number that depends on every output, and on every finite log-sum-exp."""
    out, lse = attend(*arrays)
    lse = jnp.where(jnp.isfinite(lse), lse, jnp.zeros_like(lse))
    weights = jnp.sin(jnp.arange(out.size, dtype=jnp.int32).astype(lse.dtype))
    out = jnp.sum(out.astype(lse.dtype).reshape(-1) * weights)
    return out + jnp.sum(lse * jnp.cos(lse))
