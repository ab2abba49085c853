"""What the policy of an engine sees: its ledger, and facts of its page tables."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxkv import arrays, clock, ledger
from jaxkv.engine import drafting, groups, prefix_caching, swapping
from jaxkv.engine.drafting import Drafter
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.ledger import NO_SEQUENCE, Head, PageFacts, RequestColumns
from jaxkv.memory import demand, page_sharing, page_table
from jaxkv.scheduling import interface


class _Shares(NamedTuple):
    """Pages that slots share."""

    first: Int32[Array, " slots"]
    """The first slot of the same request."""
    others: Int32[Array, " slots"]
    """Pages that a slot does not account for: one that a group shares counts once, a
    cached one never."""
    moved: Int32[Array, " slots"]
    """Pages that would move if its group were swapped out, shared ones once."""
    copies: Int32[Array, " slots"]
    """Pages that it has to copy before it writes, 0 or 1."""


def look_up_queue_head(state: EngineState, config: EngineConfig) -> Head:
    """Looks up the first requests of the queue."""
    request = state.ledger.queue[: config.num_head]
    members = arrays.take(state.sequences.members, request, fill=NO_SEQUENCE)
    swaps = state.staging is not None
    return ledger.look_up_head(state.ledger, request, members, swaps=swaps)


def counts(
    state: EngineState, config: EngineConfig, drafter: Drafter | None = None
) -> tuple[interface.Counts, prefix_caching.Found]:
    """Returns what the policy sees, and the cached pages of the head of the queue."""
    s, slots, length = state.sequences, state.slots, state.table.length
    head, size = look_up_queue_head(state, config), config.page_size
    exists, is_out = head.request >= 0, head.swapped_pages > 0
    row = jnp.maximum(head.request, 0)
    has_arrived = exists & clock.is_past(s.arrival[row], state.ledger.clock)
    # Sequences of a request are in ascending rows.
    first = jnp.where(head.exists, head.slots.sequence, config.max_sequences)
    first = jnp.min(first, axis=1)
    first = jnp.where(first < config.max_sequences, first, 0)
    looks = has_arrived & ~is_out
    found = prefix_caching.find_prefixes(state, first, head.num_to_feed, looks, config)
    goal = groups.num_tokens_to_feed(state)
    pages = page_table.num_pages(state.table, page_size=size)
    shares = _Shares(*_if_shared(jnp.stack, state, goal, config))

    seen = ledger.observe(
        state.ledger,
        head,
        groups.group_of_slots(state),
        RequestColumns(s.arrival, s.limit, s.attributes),
        PageFacts(
            length=length,
            num_pages=pages,
            owned_pages=pages - shares.others,
            owned_tokens=demand.own_tokens(length, shares.others, page_size=size),
            swap_pages=shares.moved,
            copies=shares.copies,
            group=shares.first,
            free_pages=state.pool.num_free + prefix_caching.num_idle(state),
            free_swap_pages=swapping.num_free_swap_pages(state),
        ),
        num_pages=config.num_pages,
        page_size=size,
        max_length=config.max_length,
        token_budget=config.token_budget,
    )
    in_prompt = length < arrays.take(s.prompt_length, slots.sequence, fill=0)
    keep_logprobs = arrays.take(s.keep_prompt_logprobs, slots.sequence, fill=False)
    # A policy skips unmarked rows; no request may overtake one of these.
    ready = has_arrived & ~swapping.on_host(state, head.request)
    wanted = seen.waiting_pages + found.num_idle - found.num_tokens // size
    return seen._replace(
        num_tokens=goal,
        scored_prompt=keep_logprobs & in_prompt,
        waiting=ready,
        waiting_cached=found.num_tokens,
        waiting_pages=jnp.where(exists & ~ready, interface.BLOCKED, wanted),
        waiting_scored_prompt=exists & s.keep_prompt_logprobs[first],
        spare_logit_rows=config.num_logit_rows - config.max_slots,
        drafts=None
        if drafter is None
        else drafting.requested_draft_lengths(state, drafter, config),
    ), found


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
    """Returns a function of the pages that slots share; searches only if any may.

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
                first=groups.find_slot_groups(state).first,
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
