"""Operations on arrays of fixed size whose entries may be absent (-1).

An absent id is -1 (`NO_PAGE`, `NONE`). JAX wraps negative indices even where it drops
out-of-range ones, so -1 would address the last entry. `put` and `take` disable this
wrapping; all indexing by ids that may be -1 uses them.
"""

import itertools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, PyTree, Shaped

type ArrayOrShape = Array | np.ndarray | jax.ShapeDtypeStruct
"""Leaf of a tree of arrays, or of their shapes and dtypes."""

NONE = -1
"""The id or index that means "absent"."""

MAX_PAIRWISE = 64
"""Largest number of entries for which comparing all pairs is faster than a scatter."""


def write_prefix(array: Shaped[Array, "..."], values: Shaped[Array, "..."]) -> Array:
    """Writes `values` at the start of an array, along every axis.

    With values of the size of the array, `array.at[:n].set` compiles to a scatter with
    an empty index array, on which XLA's partitioner (jax 0.11.2) aborts.
    """
    return lax.dynamic_update_slice(array, values, (0,) * array.ndim)


def put(
    values: Shaped[Array, "..."],
    index: Int32[Array, "..."] | tuple,
    updates: Shaped[Array, "..."] | int,
    how: Literal["set", "add", "min", "max"] = "set",
) -> Shaped[Array, "..."]:
    """Writes `updates` at `index` and drops indices out of range, -1 included.

    Args:
      values: the array to write to.
      index: as in `values.at[index]`; negative entries do not wrap.
      updates: new values, summands or bounds, one for each entry of `index`.
      how: method of `values.at[index]` to use.

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
    """Reads at `index`; returns `fill` for indices out of range, -1 included.

    Args:
      values: the array to read.
      index: as in `values.at[index]`; negative entries do not wrap.
      fill: value returned where `index` is out of range.

    Returns:
      The values, in the shape of `values[index]`.
    """
    if isinstance(index, tuple) and values.size < 2**31:
        # One flat axis: with several axes XLA launches a kernel to combine their range
        # checks.
        lead = values.shape[: len(index)]
        flat = jnp.int32(0)
        inside = True
        for size, column in zip(lead, index, strict=True):
            inside &= (column >= 0) & (column < size)
            flat = flat * size + column
        values = values.reshape(-1, *values.shape[len(index) :])
        index = jnp.where(inside, flat, NONE)
    return values.at[index].get(
        mode="fill", fill_value=fill, wrap_negative_indices=False
    )


def number_marked(marked: Bool[Array, " n"]) -> Int32[Array, " n"]:
    """Numbers the marked entries from 0 in order; NONE at unmarked entries."""
    return jnp.where(marked, jnp.cumsum(marked, dtype=jnp.int32) - 1, NONE)


def marked_indices(marked: Bool[Array, " n"], num: int) -> Int32[Array, " num"]:
    """Returns the indices of the first `num` marked entries, padded with NONE.

    `num` is static; marked entries beyond the first `num` are dropped.
    """
    index = jnp.arange(marked.shape[0], dtype=jnp.int32)
    return put(jnp.full((num,), NONE, jnp.int32), number_marked(marked), index)


def compact_ids(
    ids: Int32[Array, " n"], num: int | None = None
) -> Int32[Array, " num"]:
    """Compacts ids to the front, in order, and pads with NONE.

    `num`, static, is the size of the result; None means the size of `ids`.
    """
    absent = jnp.full((ids.shape[0] if num is None else num,), NONE, jnp.int32)
    return put(absent, number_marked(ids >= 0), ids)


def before_first(marked: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Marks the entries before the first marked entry; marks all if there is none."""
    # A reduction, which costs less than a cumulative sum.
    index = jnp.arange(marked.shape[0], dtype=jnp.int32)
    return index < jnp.min(jnp.where(marked, index, marked.shape[0]))


def mark_last_occurrences(ids: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Marks the last occurrence of each id; NONE is never marked.

    Compares all pairs, so use it for at most `MAX_PAIRWISE` ids.
    """
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    again = (ids[:, None] == ids[None, :]) & (place[:, None] < place[None, :])
    return (ids >= 0) & ~jnp.any(again, axis=1)


def inverse_index(ids: Int32[Array, " n"], num: int) -> Int32[Array, " num"]:
    """Inverts a list of distinct ids: entry i is the index of id i in it, or NONE.

    Compares all pairs, so `ids` should have at most `MAX_PAIRWISE` entries; `num`, the
    size of the result, is static. Only NONE may be repeated. To write several arrays at
    the same ids, call this function once and `take` from each source array: on a GPU
    every `put` is a kernel, and any number of `take`s fuse into one.
    """
    every = jnp.arange(ids.shape[0], dtype=jnp.int32)
    at = ids[:, None] == jnp.arange(num, dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(at, every[:, None], NONE), axis=0)


def update_if[T](
    wanted: Bool[Array, ""],
    change: Callable[..., T],
    carry: T,
    *operands: PyTree[ArrayLike],
) -> T:
    """Applies `change(carry, *operands)` if `wanted`, updating the carry in place.

    For work that few steps need. It is a loop of zero or one trip, because `lax.cond`
    copies a carry that it may return unchanged. The condition is part of the loop's
    state, so that testing it launches no kernel. Arrays that `change` reads should be
    passed in `carry` or `operands`: XLA hoists computations on captured arrays out of
    the loop and executes them even if `wanted` is False.

    Args:
      wanted: True if the change is applied.
      change: a function of the carry and `operands` that returns the new carry.
      carry: a pytree, donated or carried by the caller.
      *operands: further pytrees that `change` reads.
    """

    def once(state: tuple[Array, T, tuple]) -> tuple[Array, T, tuple]:
        is_first = state[0]

        # Leaf by leaf, so that unused leaves and their layouts stay out of the loop.
        def tied(leaf: Array) -> Array:
            return lax.optimization_barrier((is_first, leaf))[1]

        old, operands = jax.tree.map(tied, state[1:])
        new = change(old, *operands)
        # Leaves returned unchanged stay out of the loop's carry.
        new = jax.tree.map(
            lambda new, old, outer: outer if new is old else new, new, old, state[1]
        )
        return jnp.zeros_like(is_first), new, state[2]

    return lax.while_loop(lambda state: state[0], once, (wanted, carry, operands))[1]


def pack_leaves(tree: PyTree[Array]) -> jax.tree_util.Partial:
    """Packs the leaves of a tree into one vector per dtype.

    Returns a `Partial` that holds the vectors. Calling it unpacks the tree; a `Partial`
    whose vectors were stacked by `scan` unpacks to a tree of stacked leaves. A scan
    then writes one vector per dtype in each step rather than every leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = [(x.shape, x.dtype) for x in leaves]
    sizes = [x.size for x in leaves]
    kinds = [jnp.dtype(jnp.int32) if x.dtype == bool else x.dtype for x in leaves]
    of_kind = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in kinds}

    def unpack(*rows: Array) -> PyTree[Array]:
        leaf_by_index: dict[int, Array] = {}
        for row, members in zip(rows, of_kind.values(), strict=True):
            ends = itertools.accumulate(sizes[i] for i in members)
            parts = jnp.split(row, list(ends)[:-1], axis=-1)
            for i, part in zip(members, parts, strict=True):
                shape, dtype = shapes[i]
                leaf_by_index[i] = part.reshape(*row.shape[:-1], *shape).astype(dtype)
        return jax.tree.unflatten(
            structure, [leaf_by_index[i] for i in range(len(shapes))]
        )

    rows = [
        jnp.concatenate([leaves[i].astype(kind).reshape(-1) for i in members])
        for kind, members in of_kind.items()
    ]
    return jax.tree_util.Partial(unpack, *rows)


def any_of(*masks: Bool[Array, " n"]) -> tuple[Bool[Array, ""], ...]:
    """Returns `jnp.any` of each mask, computed in one reduction."""

    def either(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x | y for x, y in zip(a, b, strict=True))

    return tuple(lax.reduce(masks, (np.False_,) * len(masks), either, (0,)))


def reduce_groups(
    values: Shaped[Array, " n"],
    group: Int32[Array, " n"] | None,
    how: Literal["add", "max"],
) -> Shaped[Array, " n"]:
    """Reduces values over groups and returns each entry the result of its group.

    Args:
      values: numbers of at least 0, or a mask.
      group: group of each entry, in [0, n), or NONE, for which the result is 0; None
        returns `values` unchanged.
      how: sum or maximum; for masks, "max" is a logical or.
    """
    if group is None:
        return values
    if values.shape[0] <= MAX_PAIRWISE:
        same = (group[:, None] == group[None, :]) & (group >= 0)[None, :]
        member = jnp.where(same, values[:, None], jnp.zeros_like(values)[:, None])
        if how == "max":
            return jnp.max(member, axis=0)
        return jnp.sum(member, axis=0, dtype=values.dtype)
    reduced = put(jnp.zeros_like(values), group, values, how)
    return take(reduced, group, fill=0)


def to_jax_arrays[T](tree: T) -> T:
    """Converts NumPy arrays and scalars in a tree to JAX arrays, which have `at`.

    Public functions call it first. Under `jit` the leaves are JAX arrays already and
    are returned unchanged.
    """

    def one(leaf: object) -> object:
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree.map(one, tree)
