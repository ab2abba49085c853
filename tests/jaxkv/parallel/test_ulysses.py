"""All-to-all of Ulysses attention, on mapped axes instead of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.parallel.sequence import ULYSSES, ulysses_attention


def test_each_device_gets_all_tokens_of_a_part_of_the_heads() -> None:
    tokens, heads = 6, 4
    q = jnp.arange(tokens * heads, dtype=jnp.float32).reshape(1, tokens, heads, 1)
    shapes = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        shapes.append(q.shape)
        return jnp.cumsum(q, axis=1)

    run = functools.partial(ulysses_attention, attend=attend, degree=2)
    parts = jnp.stack(jnp.split(q, 2, axis=1))
    out = jax.vmap(run, axis_name=ULYSSES)(parts, parts, parts)
    assert shapes == [(1, tokens, heads // 2, 1)]
    np.testing.assert_array_equal(jnp.concatenate([*out], axis=1), jnp.cumsum(q, 1))
