"""Numbers of tokens that top-k and top-p keep."""

import jax
import jax.numpy as jnp

from jaxkv.sampling import truncation
from jaxkv.sampling.params import Params
from tests.support.trees import ints


def test_as_many_candidates_as_top_k_are_exact() -> None:
    logits = jnp.arange(8, dtype=jnp.float32)[None, ::-1]
    one = jnp.ones(1, jnp.float32)
    key = jnp.zeros((1, 2), jnp.uint32)
    zeros = ints(0)
    params = Params(one, ints(3), one, 0 * one, one, 0 * one, 0 * one, key, zeros)
    values, _ = jax.lax.top_k(logits, 4)
    num, is_exact = truncation.cut_from_candidates(
        logits, logits[:, 0], values, params, jnp.array([True])
    )
    assert (num.tolist(), is_exact.tolist()) == ([3], [True])
