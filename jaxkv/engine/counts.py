"""What the policy of an engine may know: its counts, made of the engine's state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, clock
from jaxkv.engine import (
    drafting,
    groups,
    prefix_caching,
    slot_assignment,
    swapping,
)
from jaxkv.engine.drafting import Drafter
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import demand, page_sharing, page_table
from jaxkv.scheduling import attributes, interface


class _Head(NamedTuple):
    """The requests at the head of the queue."""

    row: Int32[Array, " head"]
    """Row of each one's first sequence, or NOBODY."""
    waits: Bool[Array, "head sequences"]
    """Its sequences that wait."""
    num_slots: Int32[Array, " head"]
    """How many these are."""
    reader: Int32[Array, " head"]
    """The one that feeds first."""
    num_tokens: Int32[Array, " head"]
    """What that one has to feed: all its tokens, or those with which all begin."""
    is_out: Bool[Array, " head"]
    """Requests that are swapped out."""
    has_arrived: Bool[Array, " head"]


class _Shares(NamedTuple):
    """What slots have to do with others."""

    first: Int32[Array, " order"]
    """The first place of the same request, by place."""
    others: Int32[Array, " slots"]
    """Pages that a slot does not account for: one that a group shares counts once, a
    cached one for nobody."""
    moved: Int32[Array, " slots"]
    """Pages that would move if its group were swapped out, shared ones once."""
    copies: Int32[Array, " slots"]
    """Pages that it has to copy before it writes, 0 or 1."""


def counts(
    state: EngineState, config: EngineConfig, drafter: Drafter | None = None
) -> tuple[interface.Counts, prefix_caching.Found]:
    """What the policy may know, in order of admission and of the queue.

    And what the requests at the head of the queue would start on.
    """
    drafts = None
    if drafter is not None:
        drafts = drafting.wishes(state, drafter, config)[state.slots.order]
    head = _head_of_queue(state, config)
    looks = head.has_arrived & ~head.is_out
    found = prefix_caching.find(state, head.reader, head.num_tokens, looks, config)
    return interface.Counts(
        **_of_line(state, config),
        **_of_head(state, head, found, config),
        free_pages=state.pool.num_free + prefix_caching.num_idle(state),
        free_swap_pages=swapping.num_free(state),
        page_size=config.page_size,
        max_length=config.max_length,
        token_budget=config.token_budget,
        spare_logit_rows=config.num_logit_rows - config.max_slots,
        drafts=drafts,
    ), found


def _of_line(state: EngineState, config: EngineConfig) -> dict[str, Any]:
    """Counts of the slots, in order of admission."""
    s, slots, size = state.sequences, state.slots, config.page_size
    order = slots.order
    sequence, length = slots.sequence[order], state.table.length[order]
    goal = groups.num_to_feed(state)
    pages = page_table.num_pages(state.table, page_size=size)[order]
    shares = _Shares(*_if_shared(jnp.stack, state, goal, config))
    others = shares.others[order]
    in_prompt = length < arrays.take(s.prompt_length, sequence, fill=0)
    return dict(
        running=sequence >= 0,
        held=slots.held[order],
        group=shares.first,
        num_tokens=goal[order],
        length=length,
        num_pages=pages,
        owned_pages=pages - others,
        owned_tokens=demand.own_tokens(length, others, page_size=size),
        swap_pages=shares.moved[order],
        copies=shares.copies[order],
        preempted=arrays.take(s.num_preempted, sequence, fill=0) > 0,
        scored_prompt=arrays.take(s.prompt_scored, sequence, fill=False) & in_prompt,
        attributes=_attributes(state, sequence),
    )


def _head_of_queue(state: EngineState, config: EngineConfig) -> _Head:
    """Looks up who waits at the head of the queue."""
    s, head = state.sequences, state.queue.sequence[: config.num_head]
    waits = slot_assignment.members(state, head)
    num_slots = jnp.sum(waits, axis=1, dtype=jnp.int32)
    row = jnp.arange(waits.shape[1], dtype=jnp.int32)[None, :]
    first = jnp.min(jnp.where(waits, row, row.size), axis=1)
    reader = jnp.where(first == row.size, 0, first)
    common = arrays.take(s.num_common, head, fill=0)
    arrival = arrays.take(s.arrival, head, fill=0)
    return _Head(
        row=head,
        waits=waits,
        num_slots=num_slots,
        reader=reader,
        num_tokens=jnp.where(num_slots == 1, s.num_tokens[reader], common),
        is_out=swapping.is_out(state, head),
        has_arrived=(head >= 0) & clock.is_past(arrival, state.clock),
    )


def _of_head(
    state: EngineState, head: _Head, found: prefix_caching.Found, config: EngineConfig
) -> dict[str, Any]:
    """Counts of the requests at the head of the queue."""
    s, size, there = state.sequences, config.page_size, head.row >= 0
    common = jnp.where(head.num_slots == 1, 0, head.num_tokens)
    fresh = demand.to_begin(s.num_tokens[None, :], common, head.waits, page_size=size)
    fresh += found.num_idle - found.num_tokens // size
    back = swapping.num_wanted(state, head.row, head.waits, config)
    # A policy skips unmarked rows; no request may overtake one of these.
    ready = head.has_arrived & ~swapping.on_host(state, head.row)
    pages = jnp.where(head.is_out, back, fresh)
    return dict(
        waiting=ready,
        waiting_tokens=head.num_tokens,
        waiting_cached=found.num_tokens,
        waiting_slots=head.num_slots,
        waiting_pages=jnp.where(there & ~ready, interface.BLOCKED, pages),
        waiting_preempted=there & (s.num_preempted[head.reader] > 0),
        waiting_swapped=head.is_out,
        waiting_scored_prompt=there & s.prompt_scored[head.reader],
        waiting_attributes=_attributes(state, head.reader),
    )


def _attributes(
    state: EngineState, sequence: Int32[Array, " n"]
) -> attributes.RequestAttributes:
    """Attributes of the requests of sequences, relative to the clock."""
    s, row = state.sequences, jnp.maximum(sequence, 0)
    found = jax.tree.map(lambda column: column[row], s.attributes)
    return attributes.relative(found, s.arrival[row], s.limit[row], state.clock)


def used_places(state: EngineState, config: EngineConfig) -> Int32[Array, ""]:
    """Token places that hold K and V; those of several sequences count once."""
    # Sequences of a group are equal where they share pages, the last one included.
    size, length = config.page_size, state.table.length

    def own(shares: _Shares) -> Int32[Array, ""]:
        tokens = demand.own_tokens(length, shares.others, page_size=size)
        return jnp.sum(tokens, dtype=jnp.int32)

    cached = size * prefix_caching.num_used(state)
    return cached + _if_shared(own, state, length, config)


def _if_shared[T](
    of: Callable[[_Shares], T],
    state: EngineState,
    goal: Int32[Array, " slots"],
    config: EngineConfig,
) -> T:
    """A function of what slots share; nothing is searched where none may share any.

    `goal` are the tokens that each slot will have written.
    """
    table, pool, size = state.table, state.pool, config.page_size
    group = groups.group_of_slots(state)
    rows = goal - table.length

    def search() -> T:
        holder = page_sharing.holders(table, group)
        pinned = prefix_caching.pinned(state, table.page_ids)
        owned = page_sharing.owned_pages(table, holder, pinned=pinned)
        copies = page_table.needs_copy(pool, table, rows, page_size=size)
        return of(
            _Shares(
                first=groups.groups_in_order(state),
                others=page_table.num_pages(table, page_size=size) - owned,
                moved=swapping.num_to_move(state, holder, page_size=size),
                copies=copies.astype(jnp.int32),
            )
        )

    def alone() -> T:
        place = jnp.arange(group.shape[0], dtype=jnp.int32)
        others = moved = copies = jnp.zeros_like(group)
        pinned = prefix_caching.pinned(state, table.page_ids)
        if pinned is not None:
            others = jnp.sum(pinned, axis=1, dtype=jnp.int32)
        if state.staging is not None:
            moved = demand.pages_for(table.length, page_size=size)
        return of(_Shares(place, others, moved, copies))

    # The first of a group may share with slots that are held for the others.
    may = (group != state.slots.sequence) | page_table.is_shared(
        pool, table, rows, page_size=size
    )
    return lax.cond(jnp.any(may), search, alone)
