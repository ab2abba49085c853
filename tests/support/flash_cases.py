"""Inputs of attention over whole sequences, and a scalar function of its outputs."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def draw(
    queries: int,
    keys: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any,
    value_width: int | None = None,
) -> tuple[Any, ...]:
    rng = np.random.default_rng(queries + keys)
    shapes = [
        (2, queries, q_heads, head_dim),
        (2, keys, kv_heads, head_dim),
        (2, keys, kv_heads, value_width or head_dim),
    ]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def total(attend: Any, *arrays: Any) -> Any:
    """Returns a number that depends on every output and every finite log-sum-exp."""
    out, lse = attend(*arrays)
    lse = jnp.where(jnp.isfinite(lse), lse, jnp.zeros_like(lse))
    weights = jnp.sin(jnp.arange(out.size, dtype=jnp.int32).astype(lse.dtype))
    out = jnp.sum(out.astype(lse.dtype).reshape(-1) * weights)
    return out + jnp.sum(lse * jnp.cos(lse))
