"""Attention in one tile: queries that attend to no key, and the types."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import single_tile
from tests.support.flash_cases import total


def draw(dtype: str) -> tuple[Any, Any]:
    """Two sequences of 5 queries and 7 keys, 2 KV heads of 3 queries, and a mask."""
    rng = np.random.default_rng(0)
    shapes = [(2, 2, 3, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)]
    arrays = tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    mask = rng.random((5, 7)) < 0.6
    mask[2] = False
    return arrays, jnp.asarray(mask)


def plain(q: Any, k: Any, v: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    """Softmax over a subset, computed for each query separately."""
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", q, k) * jnp.asarray(scale, q.dtype)
    weights = jnp.where(mask[None, None, None], jnp.exp(scores), jnp.zeros_like(scores))
    total = weights.sum(-1)
    safe = jnp.where(total > 0, total, jnp.ones_like(total))
    out = jnp.einsum("bhgqk,bhkd->bhgqd", weights / safe[..., None], v)
    return out, jnp.where(total > 0, jnp.log(safe), jnp.full_like(total, -jnp.inf))


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 0.04)])
def test_outputs_and_gradients_of_queries_without_keys(dtype, error) -> None:
    arrays, mask = draw(dtype)
    out, lse = jax.jit(single_tile.attend_single_tile, static_argnums=4)(
        *arrays, mask, 0.3
    )
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    assert bool((out[..., 2, :] == 0).all())
    assert bool(jnp.isneginf(lse[..., 2]).all())

    def actual(*arrays: Any) -> Any:
        return single_tile.attend_single_tile(*arrays, mask, 0.3)

    def exact(*arrays: Any) -> Any:
        return plain(*arrays, mask, 0.3)

    slope = functools.partial(jax.grad, argnums=(0, 1, 2))
    grads = jax.jit(slope(functools.partial(total, actual)))(*arrays)
    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in arrays)
        expected = exact(*wide)
        slopes = slope(functools.partial(total, exact))(*wide)
    for a, b in zip((out, lse, *grads), (*expected, *slopes), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=error, atol=error)
