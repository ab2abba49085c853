"""Arrays of fixed size whose entries may be nobody: read, write, close up, group.

Ids carry a sentinel, -1 (`NO_PAGE`, `NOBODY`), wherever none is meant. JAX wraps
negative indices, even where out-of-range ones are dropped, so -1 would reach the last
entry. `put` and `take` switch the wrapping off; all indexing by anything that may be a
sentinel goes through them.
"""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

NONE = -1
"""Stands where an id or an index could, and none is meant."""

MAX_PAIRWISE = 64
"""As many entries are sooner compared with each other than scattered."""


def begin(array: Shaped[Array, "..."], values: Shaped[Array, "..."]) -> Array:
    """Writes values where an array begins, on every axis; it is as large as they are.

    Where they are all of it, `array.at[:n].set` scatters at an empty array of indices,
    which XLA's partitioner (jax 0.11.2) dies of.
    """
    return lax.dynamic_update_slice(array, values, (0,) * array.ndim)


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
    if isinstance(index, tuple) and values.size < 2**31:
        # As one axis: of several XLA reduces over what each of them says, a kernel.
        lead, flat, inside = values.shape[: len(index)], jnp.int32(0), True
        for size, each in zip(lead, index, strict=True):
            inside &= (each >= 0) & (each < size)
            flat = flat * size + each
        values = values.reshape(-1, *values.shape[len(index) :])
        index = jnp.where(inside, flat, NONE)
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


def before_first(marked: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Marks the entries before the first marked one; all if none is."""
    # A reduction, which costs less than a cumulative sum.
    index = jnp.arange(marked.shape[0], dtype=jnp.int32)
    return index < jnp.min(jnp.where(marked, index, marked.shape[0]))


def inverse(order: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The place of each index in a permutation of few: compares each with all."""
    index = jnp.arange(order.shape[0], dtype=jnp.int32)
    at = order[:, None] == index[None, :]
    return jnp.sum(jnp.where(at, index[:, None], 0), axis=0, dtype=jnp.int32)


def mark_last_occurrences(ids: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Marks the last place of each id in a list of few; none of NONE's.

    Compares each with all: where there are more, bid for places by `put`.
    """
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    again = (ids[:, None] == ids[None, :]) & (place[:, None] < place[None, :])
    return (ids >= 0) & ~jnp.any(again, axis=1)


def namers(ids: Int32[Array, " n"], num: int) -> Int32[Array, " num"]:
    """Says for each of `num` entries, static, which of few ids names it, or NONE.

    Compares each with all. No two ids may be the same, sentinels excepted. Whoever puts
    into several arrays at the same ids takes from them by this instead: on a GPU every
    `put` is a kernel of its own, and any number of `take` are one.
    """
    every = jnp.arange(ids.shape[0], dtype=jnp.int32)
    at = ids[:, None] == jnp.arange(num, dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(at, every[:, None], NONE), axis=0)


def when[T](
    wanted: Bool[Array, ""], change: Callable[..., T], carry: T, *given: Any
) -> T:
    """Changes a tree if it is wanted, in place: `change(carry, *given)`.

    For what few steps do. It is a loop of no or one trip, since a `cond` would copy
    what it may hand back as it was. Its condition is carried, so that it costs no
    kernel; and whatever `change` reads should be in `carry` or `given`, else the
    compiler sees what depends on nothing that the loop changes, and computes it before
    the loop, wanted or not.
    """

    def once(state: tuple[Array, T, Any]) -> tuple[Array, T, Any]:
        seen = state[0]

        # One by one: what nobody reads is then no part of the loop, layout and all.
        def tied(leaf: Array) -> Array:
            return lax.optimization_barrier((seen, leaf))[1]

        old, others = jax.tree.map(tied, state[1:])
        new = change(old, *others)
        # What is handed back untouched is no part of the loop's carry.
        new = jax.tree.map(
            lambda new, old, outer: outer if new is old else new, new, old, state[1]
        )
        return jnp.zeros_like(seen), new, state[2]

    return lax.while_loop(lambda state: state[0], once, (wanted, carry, given))[1]


def side_by_side(tree: Any) -> jax.tree_util.Partial:
    """Lays the arrays of a tree side by side, in one row for each type.

    Called, the result gives the tree back; stacked before, as by `scan`, the tree of
    stacked arrays. So a scan writes one row in each step rather than every leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes, sizes = [(x.shape, x.dtype) for x in leaves], [x.size for x in leaves]
    kinds = [jnp.dtype(jnp.int32) if x.dtype == bool else x.dtype for x in leaves]
    of_kind = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in kinds}

    def apart(*rows: Array) -> Any:
        found: dict[int, Array] = {}
        for row, members in zip(rows, of_kind.values(), strict=True):
            ends = itertools.accumulate(sizes[i] for i in members)
            parts = jnp.split(row, list(ends)[:-1], axis=-1)
            for i, part in zip(members, parts, strict=True):
                shape, dtype = shapes[i]
                found[i] = part.reshape(*row.shape[:-1], *shape).astype(dtype)
        return jax.tree.unflatten(structure, [found[i] for i in range(len(shapes))])

    rows = [
        jnp.concatenate([leaves[i].astype(kind).reshape(-1) for i in members])
        for kind, members in of_kind.items()
    ]
    return jax.tree_util.Partial(apart, *rows)


def any_of(*masks: Bool[Array, " n"]) -> tuple[Bool[Array, ""], ...]:
    """`jnp.any` of each mask, all in one reduction, which a GPU launches once."""

    def either(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x | y for x, y in zip(a, b, strict=True))

    return tuple(lax.reduce(masks, (np.False_,) * len(masks), either, (0,)))


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
    if values.shape[0] <= MAX_PAIRWISE:
        alike = (group[:, None] == group[None, :]) & (group >= 0)[None, :]
        member = jnp.where(alike, values[:, None], jnp.zeros_like(values)[:, None])
        if how == "max":
            return jnp.max(member, axis=0)
        return jnp.sum(member, axis=0, dtype=values.dtype)
    reduced = put(jnp.zeros_like(values), group, values, how)
    return take(reduced, group, fill=0)


def on_device[T](tree: T) -> T:
    """Makes JAX's arrays of NumPy's, which lack `at`; public functions begin with it.

    Under `jit`, where they are JAX's already, it does nothing.
    """

    def one(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree.map(one, tree)
