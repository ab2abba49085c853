"""Reference formulas in the type of their arguments; `in_float64` for float64."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array


def attention(
    q: Array | np.ndarray,
    k: Array | np.ndarray,
    v: Array | np.ndarray,
    *,
    causal: bool = True,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns softmax attention over whole sequences: output and log-sum-exp."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(
        q.shape[3] ** -0.5, q.dtype
    )
    query = jnp.arange(q.shape[1], dtype=jnp.int32)[:, None] + (k.shape[1] - q.shape[1])
    key = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    if causal:
        mask = key <= query
        if window is not None:
            mask &= key > query - window
        lowest = jnp.asarray(-jnp.inf, q.dtype)
        scores = jnp.where(mask[None, None], scores, lowest)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(0, 2, 1)


def in_float64[T](function: Callable[..., T], *arrays: ArrayLike) -> T:
    """Calls a function of arrays in float64."""
    with jax.enable_x64(True):
        return function(*(jnp.asarray(np.asarray(x, np.float64)) for x in arrays))
