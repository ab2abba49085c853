"""The pool: worked examples and violations; test_copy_on_write has random walks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import arrays
from jaxkv.memory import page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool
from tests.support.trees import assert_same, ints

allocate = jax.jit(page_pool.allocate, static_argnames="max_pages")
share = jax.jit(page_pool.share)
release = jax.jit(page_pool.release)
unsound = jax.jit(page_pool.count_pool_faults)


def free(pool: Pool) -> list[int]:
    """Returns the free pages, the next allocated one last."""
    return np.asarray(pool.stack)[: int(pool.num_free)].tolist()


def test_rows_are_served_in_order_from_the_top_of_the_stack() -> None:
    pool = page_pool.make_pool(8)
    pool, ids, enough = allocate(pool, ints(2, 0, 3), max_pages=3)
    assert enough
    assert ids.tolist() == [[0, 1, NO_PAGE], [NO_PAGE] * 3, [2, 3, 4]]
    assert pool.ref.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert free(pool) == [7, 6, 5]


def test_allocation_order() -> None:
    order = ints(2, 0, 3, 1, 5, 4)
    pool, ids, _ = allocate(page_pool.make_pool(6, order), ints(5), max_pages=5)
    assert ids.tolist() == [[2, 0, 3, 1, 5]]
    pool = release(pool, ints(3, NO_PAGE, 0, 2))
    assert free(pool) == [4, 3, 0, 2]
    _, ids, _ = allocate(pool, ints(3), max_pages=3)
    assert ids.tolist() == [[2, 0, 3]]


def test_a_shared_page_is_free_after_its_last_release() -> None:
    pool, ids, _ = allocate(page_pool.make_pool(4), ints(2), max_pages=2)
    pool = share(pool, jnp.concatenate([ids, ids]))
    assert pool.ref.tolist() == [3, 3, 0, 0]
    pool = release(pool, ints(0, 1, 1))
    assert pool.ref.tolist() == [2, 1, 0, 0]
    pool = release(
        pool, ints(0, 1, NO_PAGE, 0)
    )  # the last occurrence of page 0 is at the end
    assert free(pool) == [3, 2, 1, 0]
    assert unsound(pool) == 0


@pytest.mark.parametrize("want", [(3, 2), (5, 0), (-1, 1), (4, 4)])
def test_failed_allocation_leaves_the_pool_unchanged(want: tuple[int, int]) -> None:
    pool, _, _ = allocate(page_pool.make_pool(8), ints(4), max_pages=4)
    pool = release(pool, ints(1))._replace(num_free=ints(4)[0])  # 4 left
    after, ids, enough = allocate(pool, ints(*want), max_pages=4)
    assert not enough
    assert (ids == NO_PAGE).all()
    assert_same(after, pool)


def test_all_pages_and_none() -> None:
    pool = page_pool.make_pool(3)
    full, ids, enough = allocate(pool, ints(3), max_pages=3)
    assert enough
    assert full.num_free == 0
    assert_same(allocate(full, ints(0), max_pages=3), (full, ids * 0 + NO_PAGE, enough))
    assert release(full, ids).num_free == 3
    assert_same(release(full, jnp.full((2, 3), NO_PAGE, jnp.int32)), full)
    assert_same(release(full, jnp.zeros((0,), jnp.int32)), full)


def test_sentinels_skip_the_last_page() -> None:
    none = ints(NO_PAGE, 7, NO_PAGE)  # 7 is past the end of 4 pages
    pool = page_pool.make_pool(4)
    assert_same(share(pool, none), pool)
    full, _, _ = allocate(pool, ints(4), max_pages=4)
    assert_same(release(full, none), full)
    assert arrays.take(full.ref, none, fill=9).tolist() == [9, 9, 9]


def test_count_pool_faults() -> None:
    pool, ids, _ = allocate(page_pool.make_pool(6), ints(3), max_pages=3)
    assert unsound(pool) == 0
    twice = release(release(pool, ids), ids[0, :1])
    assert twice.ref.tolist() == [-1, 0, 0, 0, 0, 0]  # not clamped
    assert unsound(twice) > 0
    assert unsound(release(pool, ints(5))) > 0  # was free already
    assert unsound(release(pool, ints(0, 0))) > 0  # twice in one call
    assert unsound(share(pool, ints(5))) > 0  # use of a free page
    assert unsound(pool._replace(num_free=pool.num_free - 1)) > 0  # a page lost
    assert unsound(pool._replace(num_free=pool.num_free + 1)) > 0
    assert unsound(pool._replace(num_free=ints(7)[0])) > 0
    assert unsound(page_pool.make_pool(3)._replace(num_free=ints(4)[0])) > 0
    assert unsound(pool._replace(stack=pool.stack.at[0].set(4))) > 0  # 4 twice
    assert unsound(pool._replace(stack=pool.stack.at[0].set(6))) > 0  # no page
    assert unsound(page_pool.make_pool(3, ints(0, 1, 1))) > 0
