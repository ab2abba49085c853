"""Arrays of fixed size whose entries may be nobody: read, write, close up, group.

Ids carry a sentinel, -1 (`NO_PAGE`, `NOBODY`), wherever none is meant. JAX wraps
negative indices, even where out-of-range ones are dropped, so -1 would reach the last
entry. `put` and `take` switch the wrapping off; all indexing by anything that may be a
sentinel goes through them.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Shaped

NONE = -1
"""Stands where an id or an index could, and none is meant."""


def put(
    values: Shaped[Array, "..."],
    index: Int32[Array, "..."] | tuple,
    updates: Shaped[Array, "..."] | int,
    how: Literal["set", "add", "min", "max"] = "set",
) -> Shaped[Array, "..."]:
    """Writes `updates` at `index`, dropping what is out of range, sentinels included.

    Args:
      values: the array to write to.
      index: as in `values.at[index]`; negative entries do not wrap.
      updates: new values, summands or bounds, one for each entry of `index`.
      how: the method of `values.at[index]` to use.

    Returns:
      The new array.
    """
    write = getattr(values.at[index], how)
    return write(updates, mode="drop", wrap_negative_indices=False)


def take(
    values: Shaped[Array, "..."],
    index: Int32[Array, "..."] | tuple,
    *,
    fill: int | float,
) -> Shaped[Array, "..."]:
    """Reads at `index`, with `fill` for what is out of range, sentinels included.

    Args:
      values: the array to read.
      index: as in `values.at[index]`; negative entries do not wrap.
      fill: what to return where `index` is out of range.

    Returns:
      The values read, in the shape that `values[index]` has.
    """
    return values.at[index].get(
        mode="fill", fill_value=fill, wrap_negative_indices=False
    )


def ranks(marked: Bool[Array, " n"]) -> Int32[Array, " n"]:
    """Numbers the marked entries from 0 on, in order; NONE at all others."""
    return jnp.where(marked, jnp.cumsum(marked, dtype=jnp.int32) - 1, NONE)


def places(marked: Bool[Array, " n"], num: int) -> Int32[Array, " num"]:
    """Finds the marked entries: the k-th of them at k, NONE behind the last.

    Entries beyond `num`, static, are dropped.
    """
    index = jnp.arange(marked.shape[0], dtype=jnp.int32)
    return put(jnp.full((num,), NONE, jnp.int32), ranks(marked), index)


def packed(ids: Int32[Array, " n"], num: int | None = None) -> Int32[Array, " num"]:
    """Closes ids up, in order; NONE, wherever it stood, behind them.

    `num`, static, are the places of the result; None means as many as there are.
    """
    nobody = jnp.full((ids.shape[0] if num is None else num,), NONE, jnp.int32)
    return put(nobody, ranks(ids >= 0), ids)


def inverse(order: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The place of each index in a permutation of few: compares each with all."""
    index = jnp.arange(order.shape[0], dtype=jnp.int32)
    at = order[:, None] == index[None, :]
    return jnp.sum(jnp.where(at, index[:, None], 0), axis=0, dtype=jnp.int32)


def over_groups(
    values: Shaped[Array, " n"],
    group: Int32[Array, " n"] | None,
    how: Literal["add", "max"],
) -> Shaped[Array, " n"]:
    """Reduces values over groups; every member gets its group's result.

    Args:
      values: numbers of at least 0, or a mask.
      group: group of each entry, in [0, n), or NONE, whose result is 0; None leaves
        every entry alone.
      how: sum or maximum; of masks, "max" says whether any is marked.
    """
    if group is None:
        return values
    reduced = put(jnp.zeros_like(values), group, values, how)
    return take(reduced, group, fill=0)


def on_device[T](tree: T) -> T:
    """Makes JAX's arrays of NumPy's, which lack `at`; public functions begin with it.

    Under `jit`, where they are JAX's already, it does nothing.
    """

    def one(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree.map(one, tree)
