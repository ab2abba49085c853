"""The recurrence of packed rows over states in a pool.

Every row names the state before it and the state to overwrite, see
`memory.StateRows`. Rows of a sequence follow each other.

With one row, or equally many, for each slot, all slots advance together, token by
token. Packed rows run one after another under reproducible numerics, so that a token
has the same bits in a prompt and in decoding; else in chunks.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import arrays
from jaxkv.memory import Rows, StateRows, state_rows
from jaxkv.models.layers.recurrence import (
    CHUNK,
    RecurrentProjection,
    RecurrentRows,
    RecurrentState,
    run_chunk,
    run_tokens,
)

type _Loop = tuple[RecurrentState, Float[Array, "rows outputs"]]


def run_recurrent_rows(
    projection: RecurrentProjection,
    states: RecurrentState,
    layer: Int[Array, ""],
    rows: Rows,
    *,
    numerics: Literal["fast", "reproducible"],
) -> tuple[Float[Array, "outputs rows"], RecurrentState]:
    """Runs the rows of a step, with projections as columns.

    Args:
      projection: the projections of all rows.
      states: the states of all recurrent layers, donated or carried.
      layer: number of the layer among the recurrent ones.
      rows: the packed rows.
      numerics: "reproducible" runs packed rows token by token.

    Returns:
      The outputs, undefined on padding rows, and the states.
    """
    projection = projection._replace(rows=jax.tree.map(jnp.transpose, projection.rows))
    places = state_rows(rows)
    if rows.slot is None and numerics == "fast":
        num_slots = rows.page_ids.shape[0]
        y, states = _run_slots(projection, states, layer, places, num_slots)
    elif numerics == "fast":
        y, states = _run_chunks(projection, states, layer, places, rows.position)
    else:
        y, states = _run_one_by_one(projection, states, layer, places)
    return y.T, states


def _read(
    states: RecurrentState, layer: Int[Array, ""], ids: Int[Array, "*n"]
) -> RecurrentState:
    """Returns states of a layer, zeros for `NO_STATE`."""

    def one(leaf: Array) -> Array:
        is_state = jnp.expand_dims(ids >= 0, range(ids.ndim, ids.ndim + leaf.ndim - 2))
        return jnp.where(is_state, leaf[layer, jnp.maximum(ids, 0)], 0)

    return jax.tree.map(one, states)


def _write(
    states: RecurrentState,
    layer: Int[Array, ""],
    ids: Int[Array, "*n"],
    new: RecurrentState,
) -> RecurrentState:
    """Overwrites states of a layer; `NO_STATE` skips an entry."""

    def one(leaf: Array, value: Array) -> Array:
        place = jnp.where(ids < 0, leaf.shape[1], ids)
        return leaf.at[layer, place].set(value, mode="drop")

    return jax.tree.map(one, states, new)


def _run_slots(
    projection: RecurrentProjection,
    states: RecurrentState,
    layer: Int[Array, ""],
    places: StateRows,
    num_slots: int,
) -> tuple[Array, RecurrentState]:
    """Runs equally many rows of each slot, all slots together."""

    def split(x: Array) -> Array:
        return x.reshape(num_slots, -1, *x.shape[1:])

    source = split(places.source)[:, 0]
    target = split(places.target)
    before = _read(states, layer, source)
    by_slot = jax.tree.map(split, projection.rows)
    run = jax.vmap(
        lambda rows, state: run_tokens(projection._replace(rows=rows), state)
    )
    after, y = run(by_slot, before)
    for row in range(target.shape[1]):
        # In turn, since rows before a checkpoint have the target of that row.
        at_row = jax.tree.map(lambda x, row=row: x[:, row], after)
        states = _write(states, layer, target[:, row], at_row)
    return y.reshape(-1, y.shape[-1]), states


def _run_one_by_one(
    projection: RecurrentProjection,
    states: RecurrentState,
    layer: Int[Array, ""],
    places: StateRows,
) -> tuple[Array, RecurrentState]:
    """Runs packed rows token by token; padding rows are last."""
    rows = projection.rows
    num_rows = jnp.sum(places.target >= 0, dtype=jnp.int32)

    def one(index: Array, carry: _Loop) -> _Loop:
        states, out = carry
        row = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1), rows)
        before = _read(states, layer, places.source[index])
        # Otherwise XLA fuses a token with what surrounds it, and rounds it otherwise.
        row, before, weights = lax.optimization_barrier(
            (row, before, projection.weights)
        )
        token = RecurrentProjection(projection.config, row, weights)
        after, y = lax.optimization_barrier(run_tokens(token, before))
        after = jax.tree.map(lambda x: x[0], after)
        states = _write(states, layer, places.target[index], after)
        return states, lax.dynamic_update_slice_in_dim(out, y, index, axis=0)

    out = _blank(projection, rows)
    states, out = lax.fori_loop(0, num_rows, one, (states, out))
    return out, states


def _run_chunks(
    projection: RecurrentProjection,
    states: RecurrentState,
    layer: Int[Array, ""],
    places: StateRows,
    position: Int[Array, " rows"],
) -> tuple[Array, RecurrentState]:
    """Runs packed rows in chunks that end where a state is needed."""
    source, target = places
    num_rows = len(target)
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), target[:-1]])
    continues = (source == before) & (target == before) & (position % CHUNK != 0)
    is_first = (target >= 0) & ~continues
    first = arrays.marked_indices(is_first, num_rows + 1)
    end = jnp.sum(target >= 0, dtype=jnp.int32)
    first = jnp.where(first < 0, end, first)
    # A chunk is a slice of fixed size, whose last rows belong to later chunks.
    size = min(CHUNK, num_rows)
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, size), (0, 0))), projection.rows)
    cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=size)

    def one(index: Array, carry: _Loop) -> _Loop:
        states, out = carry
        start = first[index]
        rows = jax.tree.map(lambda x: cut(x, start), wide)
        num = first[index + 1] - start
        before = _read(states, layer, source[start])
        after, y = run_chunk(projection._replace(rows=rows), before, num)
        states = _write(states, layer, target[start], after)
        # Later chunks overwrite their rows.
        return states, lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    count = jnp.sum(is_first, dtype=jnp.int32)
    out = _blank(projection, wide)
    states, out = lax.fori_loop(0, count, one, (states, out))
    return out[:num_rows], states


def _blank(projection: RecurrentProjection, rows: RecurrentRows) -> Array:
    """Returns zeros of the shape of the outputs of `rows`."""
    shape = len(rows.mixed), projection.config.num_outputs
    return jnp.zeros(shape, rows.mixed.dtype)
