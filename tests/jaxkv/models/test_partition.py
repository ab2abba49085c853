"""The vocabulary of tensor-parallel devices."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models import partition
from jaxkv.models.partition import TENSOR


def test_every_word_is_on_one_device() -> None:
    table = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    tokens = jnp.asarray([0, 2, 3, 5, 4])
    embed = jax.vmap(partition.embed_own_tokens, in_axes=(0, None), axis_name=TENSOR)
    parts = embed(jnp.asarray(table), tokens)
    np.testing.assert_array_equal(parts.sum(0), table.reshape(6, 2)[tokens])
    own = jax.vmap(lambda _: partition.own_words(3, tokens), axis_name=TENSOR)
    local, is_here = own(jnp.zeros(2))
    assert is_here.tolist() == [
        [True, True, False, False, False],
        [False, False, True, True, True],
    ]
    assert local.tolist() == [[0, 2, 0, 0, 0], [0, 0, 0, 2, 1]]
