"""Small arrays, and trees of arrays compared bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def assert_same(a: Any, b: Any) -> None:
    """Asserts that all leaves are equal."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_maps(
    run: Callable[..., Any], calls: Sequence[tuple], single: Callable[..., Any]
) -> None:
    """Asserts that `run`, mapped over stacked calls, equals `single` for each."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)
    together = jax.jit(jax.vmap(run))(*stacked)
    for i, call in enumerate(calls):
        member = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        assert_same(member, single(*call))
