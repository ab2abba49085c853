"""The states of recurrent layers: which sequence or cached page has which state.

A state is a number, that of one entry of `Pages.states` in all recurrent layers. A
running sequence has one, which several sequences share after a fork: a step reads it,
and writes to another state if it is shared, so no state is ever copied.

A checkpoint is a state that belongs to a page of the prefix cache: the state after the
page's last token. A request can start on cached pages up to a checkpoint. No sequence
needs a checkpoint to continue, so the least recently used one is overwritten when a
state is needed. It is valid while its page is cached, which the tick of the page's
entry shows.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory.kv_pages import NO_STATE
from jaxkv.memory.page_pool import NO_PAGE
from jaxkv.memory.prefixes import (
    PrefixCache,
    checkpointed,
    entry_tick,
    new_checkpoints,
)


class StatePool(NamedTuple):
    """Uses of the states."""

    ref: Int32[Array, " states"]
    """Number of sequences that continue from each state, running or swapped out."""
    of_slot: Int32[Array, " slots"]
    """State of each slot after its written tokens; `NO_STATE` without any."""
    of_sequence: Int32[Array, " sequences"]
    """State of each swapped-out sequence, else `NO_STATE`."""
    page: Int32[Array, " states"]
    """Cached page whose end the state is at; `NO_PAGE` if it is no checkpoint."""
    entered: Int32[Array, " states"]
    """Tick at which that page entered the cache."""
    last_used: Int32[Array, " states"]
    """Tick of the cache at which a request last started on the checkpoint, or at which
    it was written."""
    of_page: Int32[Array, " pages"]
    """Checkpoint of each page, if its `page` is this one."""


@validation.checks_numbers()
def make_state_pool(
    num_states: int, *, num_slots: int, num_sequences: int, num_pages: int
) -> StatePool:
    """Makes a pool in which every state is free; sizes are at least 1."""

    def none(size: int) -> Array:
        return jnp.full((size,), NO_STATE, jnp.int32)

    return StatePool(
        ref=jnp.zeros((num_states,), jnp.int32),
        of_slot=none(num_slots),
        of_sequence=none(num_sequences),
        page=none(num_states),
        entered=jnp.zeros((num_states,), jnp.int32),
        last_used=jnp.zeros((num_states,), jnp.int32),
        of_page=none(num_pages),
    )


@validation.checks_numbers()
def allocate_states(
    pool: StatePool,
    cache: PrefixCache | None,
    want: Int32[Array, " slots"],
    *,
    max_states: int,
) -> tuple[StatePool, Int32[Array, "slots max_states"]]:
    """Picks `want` states without a use for each slot, which lose their checkpoints.

    States that are no checkpoint come first, then the least recently used ones. The
    caller must leave enough states without a use, and uses them in the same step.
    """
    (num,) = pool.ref.shape
    tick = jnp.zeros((), jnp.int32) if cache is None else cache.tick
    age = jnp.minimum(tick - pool.last_used, num)
    # Ages beyond the number of states are equal; the order of equal keys is stable.
    key = jnp.where(checkpointed(pool, cache), num + 1 - age, 0)
    order = jnp.argsort(jnp.where(pool.ref > 0, num + 2, key)).astype(jnp.int32)
    start = jnp.cumsum(want, dtype=jnp.int32) - want
    rank = jnp.arange(max_states, dtype=jnp.int32)[None, :]
    place = jnp.where(rank < want[:, None], start[:, None] + rank, -1)
    ids = arrays.take(order, place, fill=NO_STATE)
    return pool._replace(page=arrays.put(pool.page, ids, NO_PAGE)), ids


def replace_states(
    pool: StatePool, mask: Bool[Array, " slots"], states: Int32[Array, " slots"]
) -> StatePool:
    """Makes masked slots continue from other states, or from `NO_STATE`.

    The states gain a use each, and those before lose one.
    """
    before = jnp.where(mask, pool.of_slot, NO_STATE)
    after = jnp.where(mask, states, NO_STATE)
    ref = arrays.put(pool.ref, before, -1, "add")
    return pool._replace(
        ref=arrays.put(ref, after, 1, "add"),
        of_slot=jnp.where(mask, states, pool.of_slot),
    )


def attach_states(
    pool: StatePool,
    cache: PrefixCache,
    page_ids: Int32[Array, " n"],
    states: Int32[Array, " n"],
) -> StatePool:
    """Makes states the checkpoints of pages.

    Rows are skipped as by `new_checkpoints`. Of several states for one page one is
    attached.
    """
    pages, states = new_checkpoints(pool, cache, page_ids, states)
    of_page = arrays.put(pool.of_page, pages, NO_STATE)
    return pool._replace(
        page=arrays.put(pool.page, states, pages),
        entered=arrays.put(pool.entered, states, entry_tick(cache, pages)),
        last_used=arrays.put(pool.last_used, states, cache.tick),
        of_page=arrays.put(of_page, pages, states, "max"),
    )


def count_state_faults(
    pool: StatePool, lengths: Int32[Array, " slots"]
) -> Int32[Array, ""]:
    """Counts violations of the invariant of the states; 0 if the pool is sound.

    The uses of a state are the slots and sequences that name it; a slot has a state
    exactly if it has written tokens, `lengths` in number.
    """
    used = arrays.put(jnp.zeros_like(pool.ref), pool.of_slot, 1, "add")
    used = arrays.put(used, pool.of_sequence, 1, "add")
    misplaced = (pool.of_slot == NO_STATE) != (lengths == 0)
    return jnp.sum(used != pool.ref, dtype=jnp.int32) + jnp.sum(
        misplaced, dtype=jnp.int32
    )
