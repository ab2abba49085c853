"""Preemption by swapping: pages of a request move to a staging buffer and back.

A policy selects requests to swap out, see `interface.Plan.swap`. In that step, their
pages are copied to the staging buffer, shared pages once, and released. When the
request is admitted again, it gets new pages with the same contents. Pages of the prefix
cache that it used are copied as well, and come back as pages of its own.

If swapping is disabled, there is no staging buffer and no function changes the state.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.5.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, memory
from jaxkv.engine.paging import recurrent_states, window_pages
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.ledger import NO_SEQUENCE, PROGRESS, Ledger
from jaxkv.memory import copy_in, copy_out, is_out, is_written, num_free_places


def is_swapped_out(state: EngineState, group: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Returns which requests, by rows of their first sequences, are swapped out."""
    if state.staging is None:
        return jnp.zeros(group.shape, bool)
    return arrays.take(is_out(state.staging), group, fill=False)


def is_on_host(state: EngineState, group: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Returns which requests have their swapped pages in host memory.

    They can be admitted only after the host has copied the pages back to the buffer.
    """
    if state.staging is None:
        return jnp.zeros(group.shape, bool)
    return arrays.take(state.staging.on_host, group, fill=False)


def asks_host(state: EngineState) -> Bool[Array, ""]:
    """Returns True if the host should move pages.

    The next swapped request in the queue should be in the buffer, and all later ones in
    host memory, which leaves the most room for further preemptions.
    """
    if state.staging is None:
        return jnp.zeros((), bool)
    queue = state.ledger.queue
    out = is_swapped_out(state, queue)
    first = jnp.cumsum(out, dtype=jnp.int32) == 1
    host = is_on_host(state, queue)
    return jnp.any(out & jnp.where(first, host, ~host))


def num_free_swap_pages(state: EngineState) -> Int32[Array, ""]:
    """Counts the free pages of the staging buffer."""
    if state.staging is None:
        return jnp.zeros((), jnp.int32)
    return num_free_places(state.staging)


def num_to_move(
    state: EngineState,
    holder: Int32[Array, "slots pages_per_slot"],
    *,
    page_size: int,
) -> Int32[Array, " slots"]:
    """Counts the pages to move for each group, each at the lowest slot that has it."""
    if state.staging is None:
        return jnp.zeros(holder.shape[:1], jnp.int32)
    written = is_written(state.table, page_size=page_size)
    slot = jnp.arange(holder.shape[0], dtype=jnp.int32)[:, None]
    return jnp.sum(written & (holder == slot), axis=1, dtype=jnp.int32)


def swap_out(
    state: EngineState,
    leaves: Bool[Array, " slots"],
    group: Int32[Array, " slots"],
    config: EngineConfig,
) -> tuple[EngineState, Bool[Array, " slots"], Int32[Array, " slots"]]:
    """Copies the pages of slots to the buffer; the caller then releases them.

    Args:
      state: the engine.
      leaves: mask of the slots, of whole groups. They are all swapped out, or none if
        the buffer has too few free pages.
      group: first sequence of each slot's request, see `groups.group_of_slots`.
      config: the engine's configuration.

    Returns:
      The new state, the slots that are swapped out, and the pages of each slot that
      moved, shared pages counted once.
    """
    if state.staging is None:
        return state, jnp.zeros_like(leaves), jnp.zeros(leaves.shape, jnp.int32)
    leaves &= recurrent_states.has_room_to_swap(state, leaves)
    leaves = window_pages.keep_if_room(state, leaves)
    holder = memory.holders(state.table, group)
    after, left = copy_out(
        state.staging,
        state.pages,
        state.table,
        holder,
        jnp.where(leaves, state.slots.sequence, NO_SEQUENCE),
        group,
        page_size=config.page_size,
    )
    moved = num_to_move(state, holder, page_size=config.page_size)
    state = recurrent_states.swap_states_out(state, left)
    state = window_pages.swap_windows_out(state, left)
    return state._replace(staging=after), left, moved


def swap_in(state: EngineState, back: Int32[Array, " head"]) -> EngineState:
    """Swaps requests in: copies their pages from the buffer to free pages.

    The requests have slots, and the pool has enough free pages. `back` are the rows of
    their first sequences, or `NO_SEQUENCE`.
    """
    if state.staging is None:
        return state
    group = state.sequences.group
    sequence = state.slots.sequence
    is_resumed = arrays.put(jnp.zeros(group.shape, bool), back, True)
    slots = arrays.inverse_index(sequence, group.shape[0])
    slots = jnp.where(arrays.take(is_resumed, group, fill=False), slots, NO_SEQUENCE)
    pages, pool, table, after = copy_in(
        state.staging, state.pages, state.pool, state.table, group, is_resumed, slots
    )
    state = recurrent_states.swap_states_in(state, slots)
    state = window_pages.swap_windows_in(state, slots)
    return state._replace(pages=pages, pool=pool, table=table, staging=after)


def discard_ended(state: EngineState, ended: Bool[Array, " sequences"]) -> EngineState:
    """Discards the swapped pages of requests with an ended sequence.

    The remaining sequences of such a request are recomputed.
    """
    if state.staging is None:
        return state
    group = state.sequences.group
    is_dropped = arrays.put(jnp.zeros_like(ended), group, ended, "max")
    staging = memory.forget(state.staging, group, is_dropped)
    members = arrays.take(is_dropped, group, fill=False)
    state = recurrent_states.forget_swapped_states(state, members)
    state = window_pages.forget_swapped_windows(state, members)
    return state._replace(staging=staging, ledger=clear_swapped(state.ledger, members))


def clear_swapped(books: Ledger, lost: Bool[Array, " sequences"]) -> Ledger:
    """Records that sequences have lost their swapped pages."""
    progress = PROGRESS.unpack(books.progress)
    progress = progress._replace(
        swapped_tokens=jnp.where(lost, 0, progress.swapped_tokens),
        swapped_pages=jnp.where(lost, 0, progress.swapped_pages),
    )
    return books._replace(progress=PROGRESS.pack(progress))
