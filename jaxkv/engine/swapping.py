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

from jaxkv import arrays
from jaxkv.engine import groups, prefix_caching
from jaxkv.engine.state import NOBODY, EngineConfig, EngineState
from jaxkv.memory import demand, page_sharing, swap_buffer


def is_out(state: EngineState, group: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Says which requests, by the rows of their first sequences, are swapped out."""
    if state.staging is None:
        return jnp.zeros(group.shape, bool)
    return arrays.take(swap_buffer.is_out(state.staging), group, fill=False)


def on_host(state: EngineState, group: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Says which of them cannot come back before the host has moved their pages."""
    if state.staging is None:
        return jnp.zeros(group.shape, bool)
    return arrays.take(state.staging.on_host, group, fill=False)


def has_pages(state: EngineState) -> Bool[Array, " sequences"]:
    """Says which sequences have pages outside the pool."""
    if state.staging is None:
        return jnp.zeros(state.sequences.status.shape, bool)
    return state.staging.length > 0


def asks_host(state: EngineState) -> Bool[Array, ""]:
    """Says whether the host should move pages.

    The request that comes back next is best in the buffer, and all others with the
    host, since that leaves the most room for those who are preempted.
    """
    if state.staging is None:
        return jnp.zeros((), bool)
    queue = state.queue.sequence
    out = is_out(state, queue)
    first = jnp.cumsum(out, dtype=jnp.int32) == 1
    host = on_host(state, queue)
    return jnp.any(out & jnp.where(first, host, ~host))


def num_free(state: EngineState) -> Int32[Array, ""]:
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
    written = swap_buffer.written(state.table, page_size=page_size)
    slot = jnp.arange(holder.shape[0], dtype=jnp.int32)[:, None]
    return jnp.sum(written & (holder == slot), axis=1, dtype=jnp.int32)


def num_wanted(
    state: EngineState,
    head: Int32[Array, " head"],
    waits: Bool[Array, "head sequences"],
    config: EngineConfig,
) -> Int32[Array, " head"]:
    """Counts the pages that requests take when they come back and go on."""
    if state.staging is None:
        return jnp.zeros(head.shape, jnp.int32)
    s, length = state.sequences, state.staging.length
    return demand.to_come_back(
        s.num_tokens[None, :],
        arrays.take(s.num_common, s.group, fill=0)[None, :],
        length[None, :],
        swap_buffer.num_pages(state.staging, head),
        waits,
        page_size=config.page_size,
        num_pages=config.num_pages,
    )


def move_out(
    state: EngineState, leaves: Bool[Array, " slots"], config: EngineConfig
) -> tuple[EngineState, Bool[Array, " slots"]]:
    """Copies the pages of slots, whole groups, to the buffer; the caller drops these.

    Returns:
      The new state, and who is swapped out: nobody if there is no room for all.
    """
    if state.staging is None:
        return state, jnp.zeros_like(leaves)
    sequence = state.slots.sequence
    group = groups.group_of_slots(state)
    holder = page_sharing.holders(state.table, group)
    row = jnp.where(leaves, sequence, NOBODY)
    after, left = swap_buffer.move_out(
        state.staging,
        state.pages,
        state.table,
        holder,
        row,
        group,
        page_size=config.page_size,
    )
    return state._replace(staging=after), left


def coming_back(
    state: EngineState, admit: Bool[Array, " head"], head: Int32[Array, " head"]
) -> tuple[Bool[Array, " head"], Bool[Array, " head"], Int32[Array, ""]]:
    """Sees who of the admitted is swapped out, and whether there are pages for them.

    Returns:
      Who is admitted, less those swapped out if there are not pages for all of them;
      who comes back; and the pages that they take.
    """
    back = admit & is_out(state, head)
    if state.staging is None:
        return admit, back, jnp.zeros((), jnp.int32)
    pages = jnp.where(back, swap_buffer.num_pages(state.staging, head), 0)
    total = jnp.sum(pages, dtype=jnp.int32)
    free = state.pool.num_free + prefix_caching.num_idle(state)
    back &= (total <= free) & ~on_host(state, head)
    admit &= back | ~is_out(state, head)
    return admit, back, jnp.where(jnp.any(back), total, 0)


def move_in(state: EngineState, back: Int32[Array, " head"]) -> EngineState:
    """Gives requests that come back their pages; as many must be free, and their slots.

    These are named by the rows of their first sequences, `back`, NOBODY between them.
    """
    if state.staging is None:
        return state
    group, sequence = state.sequences.group, state.slots.sequence
    gone = arrays.put(jnp.zeros(group.shape, bool), back, True)
    slots = arrays.namers(sequence, group.shape[0])
    slots = jnp.where(arrays.take(gone, group, fill=False), slots, NOBODY)
    pages, pool, table, after = swap_buffer.move_in(
        state.staging, state.pages, state.pool, state.table, group, gone, slots
    )
    return state._replace(pages=pages, pool=pool, table=table, staging=after)


def cancel(state: EngineState, ended: Bool[Array, " sequences"]) -> EngineState:
    """Forgets the pages of requests of which a sequence ends while swapped out.

    Those of its sequences that go on will be fed again.
    """
    if state.staging is None:
        return state
    group = state.sequences.group
    gone = arrays.put(jnp.zeros_like(ended), group, ended, "max")
    return state._replace(staging=swap_buffer.forget(state.staging, group, gone))
