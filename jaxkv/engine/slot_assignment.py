"""Slot assignment: the sequences of admitted requests get the free slots, in order."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.engine.state import NOBODY, WAITING, EngineState


class Assignment(NamedTuple):
    """Which slots the sequences of admitted requests get."""

    row: Int32[Array, " slots"]
    """Rows of those sequences in ascending order, NOBODY behind them."""
    slot: Int32[Array, " slots"]
    """Slot of each of these, or NOBODY."""
    reader: Int32[Array, " slots"]
    """Slot of the sequence that feeds first for the request of each of these."""
    first: Int32[Array, " head"]
    """The same, by request; NOBODY if it is not admitted."""
    size: Int32[Array, " head"]
    """Sequences of each request; 0 if it is not admitted."""
    order: Int32[Array, " slots"]
    """All slots once: the occupied ones in order of admission, then the free ones,
    which are given out from the first on."""


def members(
    state: EngineState, head: Int32[Array, " head"]
) -> Bool[Array, "head sequences"]:
    """Finds the sequences that wait for a slot with each request."""
    s = state.sequences
    mine = (s.group[None, :] == head[:, None]) & (head >= 0)[:, None]
    return mine & (s.status == WAITING)[None, :]


def assign(
    state: EngineState,
    admit: Bool[Array, " head"],
    head: Int32[Array, " head"],
    occupied: Bool[Array, " slots"],
) -> Assignment:
    """Gives the k-th sequence of those admitted the k-th free slot.

    Who is preempted in this step is out of its slot. Requests at the head of the queue
    are named by the rows of their first sequences.
    """
    every = jnp.arange(occupied.shape[0], dtype=jnp.int32)
    # The free slots follow all occupied ones, in ascending order.
    order = state.slots.order
    key = jnp.where(occupied, arrays.inverse(order), order.shape[0] + every)
    order = arrays.inverse(
        jnp.sum(key[:, None] < key[None, :], axis=0, dtype=jnp.int32)
    )
    waits = members(state, head) & admit[:, None]
    row = arrays.places(jnp.any(waits, axis=0), every.shape[0])
    # Ranks by counting who comes before: [who, of whom].
    group = arrays.take(state.sequences.group, row, fill=NOBODY)
    mine = (group[None, :] == head[:, None]) & (admit & (head >= 0))[:, None]
    number = jnp.arange(head.shape[0], dtype=jnp.int32)
    request = jnp.max(jnp.where(mine, number[:, None], NOBODY), axis=0)
    sooner = (request[:, None] < request[None, :]) & (row >= 0)[:, None]
    alike = (request[:, None] == request[None, :]) & (every[:, None] < every[None, :])
    start = jnp.sum(sooner, axis=0, dtype=jnp.int32)
    rank = start + jnp.sum(alike, axis=0, dtype=jnp.int32)
    size = jnp.sum(mine, axis=1, dtype=jnp.int32)
    num_taken = jnp.sum(occupied, dtype=jnp.int32)

    def slot_of(rank: Array, exists: Array) -> Array:
        place = jnp.where(exists, num_taken + rank, NOBODY)
        return arrays.take(order, place, fill=NOBODY)

    slot = slot_of(rank, row >= 0)
    before = (request[None, :] < number[:, None]) & (row >= 0)[None, :]
    return Assignment(
        row=jnp.where(slot >= 0, row, NOBODY),
        slot=slot,
        reader=slot_of(start, row >= 0),
        first=slot_of(jnp.sum(before, axis=1, dtype=jnp.int32), size > 0),
        size=size,
        order=order,
    )
