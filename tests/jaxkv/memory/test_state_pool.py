"""Uses of recurrent states, and checkpoints of cached pages."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv.memory import (
    NO_PAGE,
    NO_STATE,
    PrefixCache,
    StatePool,
    allocate_states,
    attach_states,
    checkpoint_of,
    count_state_faults,
    insert_unpinned,
    make_prefix_cache,
    make_state_pool,
    replace_states,
)


def ids(*values: int) -> Array:
    return jnp.asarray(values, jnp.int32)


def cache_of(pages: Array, first_token: int) -> PrefixCache:
    """Returns a cache of first pages of sequences, with tokens of their own."""
    cache = make_prefix_cache(8, 2)
    tokens = first_token + jnp.arange(len(pages), dtype=jnp.int32)
    return insert_unpinned(
        cache,
        pages,
        jnp.full_like(pages, NO_PAGE),
        jnp.stack([tokens, tokens], axis=1),
        jnp.zeros(len(pages), jnp.uint32),
    )[0]


def pool_of(num_states: int = 5) -> StatePool:
    return make_state_pool(num_states, num_slots=2, num_sequences=3, num_pages=8)


def test_a_checkpoint_ends_with_the_entry_of_its_page() -> None:
    cache = cache_of(ids(2, 5), 0)
    pool = attach_states(pool_of(), cache, ids(2, 5, 7), ids(1, 3, 4))
    np.testing.assert_array_equal(checkpoint_of(pool, cache, ids(5, 2, 7)), [3, 1, -1])
    # Page 2 is evicted, and enters again with other tokens.
    later = cache_of(ids(0), 9)._replace(tick=cache.tick + 5)
    later = insert_unpinned(
        later, ids(2), ids(NO_PAGE), jnp.full((1, 2), 7), jnp.zeros(1, jnp.uint32)
    )[0]
    assert int(checkpoint_of(pool, later, ids(2))[0]) == NO_STATE


def test_the_oldest_checkpoint_is_overwritten_after_all_other_states() -> None:
    cache = cache_of(ids(2, 5), 0)
    pool = replace_states(pool_of(), jnp.asarray([True, False]), ids(0, 0))
    pool = attach_states(pool, cache, ids(2), ids(1))
    cache = cache._replace(tick=cache.tick + 1)
    pool = attach_states(pool, cache, ids(5), ids(3))
    after, states = allocate_states(pool, cache, ids(2, 1), max_states=2)
    # State 0 is in use; 2 and 4 are free; the checkpoint in state 1 is the older one.
    np.testing.assert_array_equal(states, [[2, 4], [1, NO_STATE]])
    np.testing.assert_array_equal(checkpoint_of(after, cache, ids(2, 5)), [-1, 3])


def test_uses_are_those_of_slots_and_swapped_sequences() -> None:
    pool = replace_states(pool_of(), jnp.asarray([True, True]), ids(2, 2))
    assert int(count_state_faults(pool, ids(3, 1))) == 0
    assert int(count_state_faults(pool, ids(3, 0))) == 1
    freed = replace_states(pool, jnp.asarray([False, True]), ids(0, NO_STATE))
    np.testing.assert_array_equal(freed.ref, [0, 0, 1, 0, 0])
    lost = freed._replace(ref=freed.ref.at[4].set(1))
    assert int(count_state_faults(lost, ids(3, 0))) == 1


def test_of_several_states_for_a_page_one_is_attached() -> None:
    cache = cache_of(ids(2), 0)
    pool = attach_states(pool_of(), cache, ids(2, 2), ids(1, 3))
    assert int(checkpoint_of(pool, cache, ids(2))[0]) == 3
    again = attach_states(pool, cache, ids(2), ids(4))
    assert int(checkpoint_of(again, cache, ids(2))[0]) == 3
