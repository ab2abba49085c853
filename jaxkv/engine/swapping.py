"""Preemption by swapping: a request's pages leave the pool and come back as they were.

A policy names whole requests that are preempted and keep their pages, see
`interface.Plan`.
In the same step these pages are copied to the staging buffer, each once however many
sequences of the request share it, and are free for others; when the request is admitted
again it gets as many pages, wherever they lie, with the same bits. Pages of the prefix
cache that it was using are copied, too, and are its own when it is back.

Everything here does nothing if the engine has no staging buffer.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.5.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, ledger
from jaxkv.engine import groups
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.ledger import NO_SEQUENCE, Ledger, SequenceProgress
from jaxkv.memory import page_sharing, swap_buffer


def is_swapped_out(state: EngineState, group: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Says which requests, by the rows of their first sequences, are swapped out."""
    if state.staging is None:
        return jnp.zeros(group.shape, bool)
    return arrays.take(swap_buffer.is_out(state.staging), group, fill=False)


def on_host(state: EngineState, group: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Says which of them cannot come back before the host has moved their pages."""
    if state.staging is None:
        return jnp.zeros(group.shape, bool)
    return arrays.take(state.staging.on_host, group, fill=False)


def asks_host(state: EngineState) -> Bool[Array, ""]:
    """Says whether the host should move pages.

    The request that comes back next is best in the buffer, and all others with the
    host, since that leaves the most room for those who are preempted.
    """
    if state.staging is None:
        return jnp.zeros((), bool)
    queue = state.ledger.queue
    out = is_swapped_out(state, queue)
    first = jnp.cumsum(out, dtype=jnp.int32) == 1
    host = on_host(state, queue)
    return jnp.any(out & jnp.where(first, host, ~host))


def num_free_swap_pages(state: EngineState) -> Int32[Array, ""]:
    """Counts the pages that can be swapped out."""
    if state.staging is None:
        return jnp.zeros((), jnp.int32)
    return swap_buffer.num_free(state.staging)


def num_to_move(
    state: EngineState,
    holder: Int32[Array, "slots pages_per_slot"],
    *,
    page_size: int,
) -> Int32[Array, " slots"]:
    """Counts the pages that leave with each group, at the lowest slot that has them."""
    if state.staging is None:
        return jnp.zeros(holder.shape[:1], jnp.int32)
    written = swap_buffer.is_written(state.table, page_size=page_size)
    slot = jnp.arange(holder.shape[0], dtype=jnp.int32)[:, None]
    return jnp.sum(written & (holder == slot), axis=1, dtype=jnp.int32)


def move_pages_out(
    state: EngineState, leaves: Bool[Array, " slots"], config: EngineConfig
) -> tuple[EngineState, Bool[Array, " slots"], Int32[Array, " slots"]]:
    """Copies the pages of slots, whole groups, to the buffer; the caller drops these.

    Returns:
      The new state, the slots that are swapped out (none if there is no room for all),
      and the pages of each slot that moved, shared ones once.
    """
    if state.staging is None:
        return state, jnp.zeros_like(leaves), jnp.zeros(leaves.shape, jnp.int32)
    group = groups.group_of_slots(state)
    holder = page_sharing.holders(state.table, group)
    after, left = swap_buffer.swap_out(
        state.staging,
        state.pages,
        state.table,
        holder,
        jnp.where(leaves, state.slots.sequence, NO_SEQUENCE),
        group,
        page_size=config.page_size,
    )
    moved = num_to_move(state, holder, page_size=config.page_size)
    return state._replace(staging=after), left, moved


def bring_pages_in(state: EngineState, back: Int32[Array, " head"]) -> EngineState:
    """Gives requests that come back their pages; as many must be free, and their slots.

    `back` are the rows of their first sequences, `NO_SEQUENCE` between them.
    """
    if state.staging is None:
        return state
    group, sequence = state.sequences.group, state.slots.sequence
    gone = arrays.put(jnp.zeros(group.shape, bool), back, True)
    slots = arrays.inverse_index(sequence, group.shape[0])
    slots = jnp.where(arrays.take(gone, group, fill=False), slots, NO_SEQUENCE)
    pages, pool, table, after = swap_buffer.swap_in(
        state.staging, state.pages, state.pool, state.table, group, gone, slots
    )
    return state._replace(pages=pages, pool=pool, table=table, staging=after)


def give_up_pages(state: EngineState, ended: Bool[Array, " sequences"]) -> EngineState:
    """Gives up the pages of requests of which a sequence ends while swapped out.

    Sequences of the request that go on will be fed again.
    """
    if state.staging is None:
        return state
    group = state.sequences.group
    gone = arrays.put(jnp.zeros_like(ended), group, ended, "max")
    staging = swap_buffer.forget(state.staging, group, gone)
    members = arrays.take(gone, group, fill=False)
    return state._replace(staging=staging, ledger=clear_swapped(state.ledger, members))


def clear_swapped(books: Ledger, lost: Bool[Array, " sequences"]) -> Ledger:
    """Notes that sequences have lost the pages that were swapped out."""
    progress = ledger.columns(SequenceProgress, books.progress)
    progress = progress._replace(
        swapped_tokens=jnp.where(lost, 0, progress.swapped_tokens),
        swapped_pages=jnp.where(lost, 0, progress.swapped_pages),
    )
    return books._replace(progress=jnp.stack(progress, axis=1))
