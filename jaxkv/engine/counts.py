"""The `Counts` that an engine passes to its policy, from ledger and page tables."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxkv import arrays, clock, ledger, memory
from jaxkv.engine import drafting, groups, paging
from jaxkv.engine.drafting import Drafter
from jaxkv.engine.state import ALL_KINDS, EngineConfig, EngineState, RequestKinds
from jaxkv.ledger import NO_SEQUENCE, Head, PageFacts, RequestColumns
from jaxkv.memory import (
    EVICTION_RULES,
    is_shared,
    needs_copy,
    num_pages,
    own_tokens,
    owned_pages,
    pages_for,
)
from jaxkv.scheduling import BLOCKED, Counts

_HALF_WORD = 1 << 15
"""Two counts below it fit into an int32."""


class _Shares(NamedTuple):
    """Shared pages of the slots."""

    first: Int32[Array, " slots"]
    """First slot of the same request."""
    others: Int32[Array, " slots"]
    """Pages that the slot does not account for: pages owned by an earlier slot of its
    group, and cached pages."""
    idle: Int32[Array, " slots"]
    """Cached pages that no other slot uses, which become idle with the slot."""
    moved: Int32[Array, " slots"]
    """Pages that would move if the group were swapped out; shared pages count once."""
    copies: Int32[Array, " slots"]
    """Pages to copy before the next write (copy-on-write), 0 or 1."""


def head_of_queue(state: EngineState, config: EngineConfig) -> Head:
    """Returns the requests at the head of the queue."""
    request = state.ledger.queue[: config.num_head]
    members = arrays.take(state.sequences.members, request, fill=NO_SEQUENCE)
    swaps = state.staging is not None
    return ledger.look_up_head(state.ledger, request, members, swaps=swaps)


def observe_engine(
    state: EngineState,
    config: EngineConfig,
    drafter: Drafter | None = None,
    kinds: RequestKinds = ALL_KINDS,
) -> tuple[Counts, paging.PrefixMatch]:
    """Returns the `Counts` for the policy, and the cached pages of waiting requests."""
    s = state.sequences
    slots = state.slots
    length = state.table.length
    head = head_of_queue(state, config)
    size = config.page_size
    exists = head.request >= 0
    is_out = head.swapped_pages > 0
    row = jnp.maximum(head.request, 0)
    has_arrived = exists & clock.is_past(s.arrival[row], state.ledger.clock)
    # Sequences of a request are in ascending rows.
    first = jnp.where(head.exists, head.slots.sequence, config.max_sequences)
    first = jnp.min(first, axis=1)
    first = jnp.where(first < config.max_sequences, first, 0)
    looks = has_arrived & ~is_out
    prefix_match = paging.match_prefixes(state, first, head.num_to_feed, looks, config)
    goal = paging.end_rows_at_eviction(state, groups.tokens_to_feed(state), config)
    pages = num_pages(state.table, page_size=size)
    group = groups.group_of_slots(state)
    shares = _Shares(*_if_shared(jnp.stack, state, group, goal, config, kinds))

    counts = ledger.observe(
        state.ledger,
        head,
        group,
        RequestColumns(s.arrival, s.limit, s.attributes),
        PageFacts(
            length=length,
            num_pages=pages,
            owned_pages=pages - shares.others + shares.idle,
            owned_tokens=own_tokens(length, shares.others, page_size=size),
            swap_pages=shares.moved,
            copies=shares.copies,
            group=shares.first,
            free_pages=state.pool.num_free + paging.num_idle(state),
            free_swap_pages=paging.num_free_swap_pages(state),
        ),
        num_pages=config.num_pages,
        page_size=size,
        max_length=config.max_length,
        token_budget=config.token_budget,
    )
    in_prompt = state.table.position < arrays.take(
        s.prompt_length, slots.sequence, fill=0
    )
    keep_logprobs = arrays.take(s.keep_prompt_logprobs, slots.sequence, fill=False)
    # BLOCKED, since a policy skips unmarked rows and later requests may not overtake.
    ready = has_arrived & ~paging.is_on_host(state, head.request)
    wanted = (
        counts.waiting_pages + prefix_match.num_idle - prefix_match.num_tokens // size
    )
    if config.evict in EVICTION_RULES:
        # A prompt that is computed again ends where its tokens are evicted.
        num = jnp.minimum(counts.waiting_tokens, s.prompt_length[first])
        counts = counts._replace(waiting_tokens=num)
    return counts._replace(
        target_length=goal,
        scored_prompt=keep_logprobs & in_prompt,
        waiting=ready,
        waiting_cached=prefix_match.num_tokens,
        waiting_pages=jnp.where(exists & ~ready, BLOCKED, wanted),
        waiting_scored_prompt=exists & s.keep_prompt_logprobs[first],
        spare_logit_rows=config.num_logit_rows - config.max_slots,
        drafts=None
        if drafter is None
        else drafting.requested_draft_lengths(state, drafter, config),
        shared_pages=None
        if state.prefixes is None
        else config.num_pages
        - counts.free_pages
        - jnp.sum(counts.owned_pages, dtype=jnp.int32),
        lockstep=None if state.search is None else groups.is_beam(state),
    ), prefix_match


def used_places(
    state: EngineState, config: EngineConfig, kinds: RequestKinds = ALL_KINDS
) -> Int32[Array, ""]:
    """Counts the token places with K and V; shared places count once."""
    # Sequences that share a last page are equal on it, so counting it once is exact.
    size = config.page_size
    length = state.table.length

    def count_tokens(shares: _Shares) -> Int32[Array, ""]:
        tokens = own_tokens(length, shares.others, page_size=size)
        return jnp.sum(tokens, dtype=jnp.int32)

    cached = size * paging.num_used(state)
    group = groups.group_of_slots(state)
    return cached + _if_shared(count_tokens, state, group, length, config, kinds)


def _if_shared[T](
    of: Callable[[_Shares], T],
    state: EngineState,
    group: Int32[Array, " slots"],
    goal: Int32[Array, " slots"],
    config: EngineConfig,
    kinds: RequestKinds,
) -> T:
    """Returns `of(shares)`; skips the search for shared pages if there can be none.

    Args:
      of: a function of the shared pages.
      state: the engine.
      group: first sequence of each slot's request, see `groups.group_of_slots`.
      goal: tokens that each slot will have written.
      config: the engine's configuration.
      kinds: kinds of requests in the slots.
    """
    table = state.table
    pool = state.pool
    size = config.page_size
    rows = goal - table.length

    def count_cached() -> tuple[Array, Array]:
        """Counts the cached pages of each slot, and `_Shares.idle`."""
        pinned = paging.is_pinned(state, table.page_ids)
        if pinned is None:
            return jnp.zeros_like(group), jnp.zeros_like(group)
        # One use is that of the cache.
        alone = pinned & (arrays.take(pool.ref, table.page_ids, fill=0) == 2)
        if table.page_ids.shape[1] >= _HALF_WORD:
            cached, idle = jnp.sum(jnp.stack([pinned, alone]), axis=2, dtype=jnp.int32)
            return cached, idle
        # One sum of both, since a second one would be a kernel launch.
        both = jnp.where(pinned, jnp.where(alone, _HALF_WORD + 1, 1), 0)
        both = jnp.sum(both, axis=1, dtype=jnp.int32)
        return both % _HALF_WORD, both // _HALF_WORD

    def search() -> T:
        holder = memory.holders(table, group)
        pinned = paging.is_pinned(state, table.page_ids)
        _, idle = count_cached()
        owned = owned_pages(table, holder, pinned=pinned)
        copies = needs_copy(pool, table, rows, page_size=size)
        return of(
            _Shares(
                first=ledger.find_groups(group).first,
                others=num_pages(table, page_size=size) - owned,
                idle=idle,
                moved=paging.num_to_move(state, holder, page_size=size),
                copies=copies.astype(jnp.int32),
            )
        )

    def no_shares() -> T:
        place = jnp.arange(group.shape[0], dtype=jnp.int32)
        moved = copies = jnp.zeros_like(group)
        others, idle = count_cached()
        if state.staging is not None:
            moved = pages_for(table.length, page_size=size)
        return of(_Shares(place, others, idle, moved, copies))

    if not kinds.grouped and state.prefixes is None:
        return no_shares()
    # A group's first sequence may share pages with slots that are held.
    may = (group != state.slots.sequence) | is_shared(pool, table, rows, page_size=size)
    return lax.cond(jnp.any(may), search, no_shares)
