"""Sentinels, compaction, permutations and groups, against plain NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import arrays
from jaxkv.arrays import NONE
from tests.support.marks import one_quick
from tests.support.trees import ints

pytestmark = pytest.mark.usefixtures("full_optimization")


@pytest.mark.parametrize("outside", [NONE, -4, 3, 2**31 - 1])
def test_out_of_range_indices_are_skipped(outside: int) -> None:
    values = ints(5, 6, 7)
    for how in ("set", "add", "min", "max"):
        assert arrays.put(values, ints(outside), 1, how).tolist() == [5, 6, 7]
    assert arrays.take(values, ints(outside, 2), fill=-9).tolist() == [-9, 7]


@pytest.mark.parametrize("num", one_quick([17, 1, 4, 16, 70]))
def test_packed_keeps_the_order(num: int) -> None:
    rng = np.random.default_rng(num)
    for _ in range(20):
        marked = rng.random(num) < rng.random()
        where = np.flatnonzero(marked)
        ranks = np.full(num, NONE)
        ranks[where] = np.arange(where.size)
        np.testing.assert_array_equal(arrays.number_marked(jnp.asarray(marked)), ranks)
        for size in (num // 2 + 1, num, num + 3):
            expected = np.full(size, NONE)
            expected[: where.size] = where[:size]
            indices = arrays.marked_indices(jnp.asarray(marked), size)
            np.testing.assert_array_equal(indices, expected)
            ids = jnp.asarray(np.where(marked, 10 + np.arange(num), NONE), jnp.int32)
            expected = np.where(expected == NONE, NONE, expected + 10)
            np.testing.assert_array_equal(arrays.compact_ids(ids, size), expected)


def test_group_reductions() -> None:
    group = ints(2, 0, NONE, 2, 0, 1)
    values = ints(3, 1, 8, 4, 0, 6)
    assert arrays.reduce_groups(values, group, "add").tolist() == [7, 1, 0, 7, 1, 6]
    assert arrays.reduce_groups(values, group, "max").tolist() == [4, 1, 0, 4, 1, 6]
    marked = arrays.reduce_groups(values > 3, group, "max")
    assert marked.tolist() == [True, False, False, True, False, True]
    assert arrays.reduce_groups(values, None, "add").tolist() == values.tolist()


@pytest.mark.parametrize("num", [arrays.MAX_PAIRWISE, arrays.MAX_PAIRWISE + 1])
def test_large_group_reductions_equal_small_ones(num: int) -> None:
    rng = np.random.default_rng(0)
    group = rng.integers(NONE, num, num)
    values = rng.integers(0, 9, num)
    alike = (group[:, None] == group) & (group >= 0)[:, None]
    arguments = jnp.asarray(values, jnp.int32), jnp.asarray(group, jnp.int32)
    for how, reduced in (("add", (alike @ values)), ("max", (alike * values).max(1))):
        np.testing.assert_array_equal(arrays.reduce_groups(*arguments, how), reduced)


def test_inverse_index() -> None:
    assert arrays.inverse_index(ints(3, NONE, 0, 7), 5).tolist() == [
        2,
        NONE,
        NONE,
        0,
        NONE,
    ]


def test_conditional_update() -> None:
    def change(carry: dict[str, Any], by: Any) -> dict[str, Any]:
        return carry | {"changed": carry["changed"] + by}

    def run(wanted: Any, carry: Any) -> Any:
        return arrays.update_if(wanted, change, carry, ints(5, 6))

    carry = {"changed": ints(1, 2), "kept": ints(3)}
    for wanted, expected in ((False, [1, 2]), (True, [6, 8])):
        carry_after = jax.jit(run)(jnp.asarray(wanted), carry)
        assert carry_after["changed"].tolist() == expected
        assert carry_after["kept"].tolist() == [3]
    # Unchanged leaves are not part of the loop's carry.
    jaxpr = jax.make_jaxpr(run)(True, carry)
    [loop] = [x for x in jaxpr.eqns if x.primitive.name == "while"]
    assert len(loop.outvars) == 2  # the flag, and the changed leaf
    batched_carry = jax.vmap(run, (0, None))(jnp.asarray([True, False]), carry)
    assert batched_carry["changed"].tolist() == [[6, 8], [1, 2]]


def test_packed_leaves_unpack_with_leading_axes() -> None:
    def tree(step: Any) -> Any:
        return (
            step * jnp.ones((2, 3), jnp.int32),
            {"odd": step % 2 == 1, "none": jnp.zeros((0,), jnp.float32)},
            jnp.full((2,), 0.5) * step.astype(jnp.float32),
        )

    steps = jnp.arange(4, dtype=jnp.int32)
    assert len(jax.tree.leaves(arrays.pack_leaves(tree(steps[0])))) == 2
    _, rows = jax.lax.scan(lambda _, x: (_, arrays.pack_leaves(tree(x))), 0, steps)
    expected = jax.vmap(tree)(steps)
    row_tree = rows()
    assert jax.tree.structure(row_tree) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (row_tree, expected)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)
