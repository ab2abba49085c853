"""Sentinels, closing up, permutations and groups, against plain NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import arrays
from jaxkv.arrays import NONE
from tests.support.trees import ints


@pytest.mark.parametrize("outside", [NONE, -4, 3, 2**31 - 1])
def test_what_is_out_of_range_is_neither_written_nor_read(outside: int) -> None:
    values = ints(5, 6, 7)
    for how in ("set", "add", "min", "max"):
        assert arrays.put(values, ints(outside), 1, how).tolist() == [5, 6, 7]
    assert arrays.take(values, ints(outside, 2), fill=-9).tolist() == [-9, 7]


@pytest.mark.parametrize("num", [1, 4, 16, 17, 70])
def test_closing_up_keeps_the_order(num: int) -> None:
    rng = np.random.default_rng(num)
    for _ in range(20):
        marked = rng.random(num) < rng.random()
        where = np.flatnonzero(marked)
        ranks = np.full(num, NONE)
        ranks[where] = np.arange(where.size)
        np.testing.assert_array_equal(arrays.ranks(jnp.asarray(marked)), ranks)
        for size in (num // 2 + 1, num, num + 3):
            expected = np.full(size, NONE)
            expected[: where.size] = where[:size]
            found = arrays.places(jnp.asarray(marked), size)
            np.testing.assert_array_equal(found, expected)
            ids = jnp.asarray(np.where(marked, 10 + np.arange(num), NONE), jnp.int32)
            expected = np.where(expected == NONE, NONE, expected + 10)
            np.testing.assert_array_equal(arrays.packed(ids, size), expected)


def test_a_permutation_is_inverted() -> None:
    order = np.random.default_rng(0).permutation(33)
    found = arrays.inverse(jnp.asarray(order, jnp.int32))
    np.testing.assert_array_equal(found, np.argsort(order))


def test_groups_share_their_sum_and_their_maximum() -> None:
    group, values = ints(2, 0, NONE, 2, 0, 1), ints(3, 1, 8, 4, 0, 6)
    assert arrays.over_groups(values, group, "add").tolist() == [7, 1, 0, 7, 1, 6]
    assert arrays.over_groups(values, group, "max").tolist() == [4, 1, 0, 4, 1, 6]
    marked = arrays.over_groups(values > 3, group, "max")
    assert marked.tolist() == [True, False, False, True, False, True]
    assert arrays.over_groups(values, None, "add").tolist() == values.tolist()
