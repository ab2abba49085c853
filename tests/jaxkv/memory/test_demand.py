"""Pages that requests need."""

import jax.numpy as jnp

from jaxkv.memory.demand import pages_to_start
from tests.support.trees import ints


def test_shared_full_pages_count_once() -> None:
    waits = jnp.array([[True, True, True], [True, False, False]])
    num_tokens = jnp.asarray([[9, 9, 12], [9, 9, 9]], jnp.int32)
    num_pages = pages_to_start(num_tokens, ints(8, 8), waits, page_size=4)
    assert num_pages.tolist() == [2 + 3, 3]
