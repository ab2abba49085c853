"""Slots for the sequences of admitted requests: free ones, in order."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv.engine.state import NOBODY, WAITING, EngineState
from jaxkv.memory import page_pool


class Seats(NamedTuple):
    """Which slots the sequences of admitted requests get."""

    slot: Int32[Array, " sequences"]
    """Slot of each sequence, or NOBODY."""
    reader: Int32[Array, " sequences"]
    """Slot of the sequence that feeds for its group first."""
    first: Int32[Array, " head"]
    """The same, by request."""
    size: Int32[Array, " head"]
    """Sequences of each request; 0 if it is not admitted."""
    taken: Int32[Array, " slots"]
    """All those slots, side by side."""


def members(
    state: EngineState, head: Int32[Array, " head"]
) -> Bool[Array, "head sequences"]:
    """Finds the sequences that wait for a slot with each request."""
    s = state.sequences
    mine = (s.group[None, :] == head[:, None]) & (head >= 0)[:, None]
    return mine & (s.status == WAITING)[None, :]


def seat(
    state: EngineState,
    admit: Bool[Array, " head"],
    head: Int32[Array, " head"],
    free: Bool[Array, " slots"],
) -> Seats:
    """Gives the k-th sequence of those admitted the k-th free slot."""
    every = jnp.arange(free.shape[0], dtype=jnp.int32)
    order = page_pool.packed(jnp.where(free, every, NOBODY))
    waits = members(state, head) & admit[:, None]
    size = jnp.sum(waits, axis=1, dtype=jnp.int32)
    start = jnp.cumsum(size, dtype=jnp.int32) - size
    within = jnp.cumsum(waits, axis=1, dtype=jnp.int32) - 1
    rank = jnp.max(jnp.where(waits, start[:, None] + within, NOBODY), axis=0)
    first = jnp.max(jnp.where(waits, start[:, None], NOBODY), axis=0)
    return Seats(
        slot=page_pool.take(order, rank, fill=NOBODY),
        reader=page_pool.take(order, first, fill=NOBODY),
        first=page_pool.take(order, jnp.where(size > 0, start, NOBODY), fill=NOBODY),
        size=size,
        taken=jnp.where(every < jnp.sum(size, dtype=jnp.int32), order, NOBODY),
    )
