"""Applies a plan: preemption, admission, page reservation and copy-on-write."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, ledger, memory
from jaxkv.engine import beam_search, counts, groups, paging
from jaxkv.engine.emitting import record_routes
from jaxkv.engine.state import ALL_KINDS, EngineConfig, EngineState, RequestKinds
from jaxkv.ledger import NO_SEQUENCE, SlotPlan
from jaxkv.memory import (
    NO_PAGE,
    Eviction,
    make_prefix_cache,
    make_staging,
    move_slots,
    num_new_pages,
    release_counted,
)
from jaxkv.scheduling import Plan


class SchedulingCounts(NamedTuple):
    """Numbers of preemptions and admissions in a step."""

    num_preempted: Int32[Array, ""]
    """Preempted sequences."""
    num_swapped_out: Int32[Array, ""]
    """Preempted sequences that were swapped out."""
    num_swapped_in: Int32[Array, ""]
    """Sequences that were swapped in."""
    num_admitted: Int32[Array, ""]
    """Admitted requests."""


class AppliedPlan(NamedTuple):
    """A plan after its application."""

    scheduling: SchedulingCounts
    num_rows: Int32[Array, " slots"]
    """Tokens to feed, drafts excluded; 0 if there were not enough pages."""
    granted: Int32[Array, " slots"] | None
    """Granted draft length of each slot; None if there is no drafter."""
    num_places: Int32[Array, " slots"]
    """Token places reserved for each slot, those of drafts excluded."""
    num_copied: Int32[Array, ""]
    """Pages copied before a write because they are shared."""
    enough: Bool[Array, ""]
    """True if there were pages for the whole plan."""


class _Batch(NamedTuple):
    """The slots after preemption and admission."""

    plan: SlotPlan
    scheduling: Int32[Array, " counts"]
    """Fields of `SchedulingCounts`."""
    back: Int32[Array, " head"] | None
    """Requests that are swapped in, by the rows of their first sequences, or
    `NO_SEQUENCE`; None without swapping."""
    num_back: Int32[Array, ""] | None
    """Pages that they need; None without swapping."""


def apply_plan(
    state: EngineState,
    plan: Plan,
    prefix_match: paging.PrefixMatch,
    config: EngineConfig,
    eviction: Eviction | None = None,
    kinds: RequestKinds = ALL_KINDS,
) -> tuple[EngineState, AppliedPlan]:
    """Preempts and admits, reserves pages, and copies shared pages before a write.

    Args:
      state: the engine.
      plan: the plan.
      prefix_match: the cached pages of the requests at the head of the queue.
      config: the engine's configuration.
      eviction: the eviction rule of the prefix cache.
      kinds: kinds of requests in the slots and in the queue.

    Returns:
      The new state, with all pages reserved that the step writes; and the applied plan.
    """
    # Padded to one length, since two reductions would be two kernel launches.
    size = max(plan.preempt.shape[0], plan.admit.shape[0])
    preempt, admit = (
        jnp.pad(x, (0, size - x.shape[0])) for x in (plan.preempt, plan.admit)
    )
    with jax.named_scope("preempt_and_admit"):
        # Used as it is if no sequence is preempted or admitted.
        batch = _unchanged_batch(state, plan)
        state, batch = arrays.update_if(
            jnp.any(preempt | admit),
            functools.partial(
                _preempt_and_admit, config=config, eviction=eviction, kinds=kinds
            ),
            (state, batch),
            plan,
            prefix_match,
        )
    table = state.table
    state, num_copied, enough = _reserve(state, batch, config)
    _, num_rows, granted = batch.plan.within(config.token_budget)
    return state, AppliedPlan(
        scheduling=SchedulingCounts(*batch.scheduling),
        num_rows=jnp.where(enough, num_rows, 0),
        granted=None if granted is None else jnp.where(enough, granted, 0),
        num_places=jnp.maximum(table.length + table.ahead, batch.plan.places),
        num_copied=num_copied,
        enough=enough,
    )


def _unchanged_batch(state: EngineState, plan: Plan) -> _Batch:
    """Returns the slots if no sequence is preempted or admitted."""
    staged = state.staging is not None
    return _Batch(
        plan=SlotPlan(plan.places, plan.num_rows, plan.drafts),
        scheduling=jnp.zeros((len(SchedulingCounts._fields),), jnp.int32),
        back=jnp.full(plan.admit.shape, NO_SEQUENCE, jnp.int32) if staged else None,
        num_back=jnp.zeros((), jnp.int32) if staged else None,
    )


def _preempt_and_admit(
    carry: tuple[EngineState, _Batch],
    plan: Plan,
    prefix_match: paging.PrefixMatch,
    *,
    config: EngineConfig,
    eviction: Eviction | None,
    kinds: RequestKinds,
) -> tuple[EngineState, _Batch]:
    """Preempts and admits. Skipped in steps that do neither."""
    state, batch = carry
    # The carried plan: a second copy of its arrays would be two launches.
    plan = plan._replace(**batch.plan._asdict())
    head = counts.head_of_queue(state, config)
    first_sequence = groups.group_of_slots(state)
    group = ledger.find_groups(first_sequence) if kinds.grouped else None
    plan = ledger.preempt_groups(plan, state.slots, group)
    is_preempted = plan.preempt
    # Pages are released before the slots move: the page table is indexed by slot.
    state = beam_search.store_paths(state, is_preempted, group, config)
    num_common = groups.num_common(state, is_preempted, group)
    state, leaves, moved = paging.swap_out(state, plan.swap, first_sequence, config)
    at = jnp.where(leaves, state.slots.sequence, NO_SEQUENCE)
    num_swapped = arrays.put(state.sequences.num_swapped, at, 1, "add")
    books, preempted = ledger.preempt(
        state.ledger,
        is_preempted,
        first_sequence,
        group,
        length=state.table.position,
        num_common=num_common,
        swapped_pages=moved,
        is_swapped=leaves & (state.table.length > 0),
    )
    state = state._replace(sequences=state.sequences._replace(num_swapped=num_swapped))
    state = record_routes(state, is_preempted)
    state = paging.release_slots(state, is_preempted, eviction)
    books, new = ledger.admit(
        books,
        head,
        plan,
        preempted,
        ready=~paging.is_on_host(state, head.request),
        free_pages=state.pool.num_free + paging.num_idle(state),
    )
    source = new.source
    num_slots = new.source.shape[0]
    stays = jnp.where(source < num_slots, source, NO_SEQUENCE)
    state = state._replace(ledger=books, table=move_slots(state.table, stays))
    state = paging.move_states(state, stays)
    state = paging.move_queries(state, stays)
    state = paging.move_windows(state, stays)
    # Slot of the first sequence of each admitted request.
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    index = jnp.where(source >= num_slots, source - num_slots, NO_SEQUENCE)
    is_first = arrays.take(head.is_first.ravel(), index, fill=False)
    request = jnp.where(is_first, index // head.is_first.shape[1], NO_SEQUENCE)
    first = jnp.full(new.admitted.shape, NO_SEQUENCE, jnp.int32)
    state = paging.start_on_cached_pages(
        state, prefix_match, arrays.put(first, request, slot)
    )
    back = new.swapped_in
    scheduling = SchedulingCounts(
        num_preempted=jnp.sum(is_preempted, dtype=jnp.int32),
        num_swapped_out=jnp.sum(leaves, dtype=jnp.int32),
        num_swapped_in=jnp.sum(jnp.where(back, head.num_slots, 0), dtype=jnp.int32),
        num_admitted=jnp.sum(new.admitted, dtype=jnp.int32),
    )
    staged = state.staging is not None
    return state, _Batch(
        plan=new.plan,
        scheduling=jnp.stack(scheduling),
        back=jnp.where(back, head.request, NO_SEQUENCE) if staged else None,
        num_back=new.pages_in if staged else None,
    )


def forget_kv(
    state: EngineState, *, config: EngineConfig, eviction: Eviction | None = None
) -> EngineState:
    """Makes the engine compute all K and V again, as after a change of parameters.

    Running sequences are preempted, and recomputed once a policy admits them. The
    prefix cache and the swap buffer are emptied; swapped sequences are recomputed too.
    """
    runs = ledger.is_running(state.slots)
    none = jnp.zeros(runs.shape, jnp.int32)
    head = jnp.zeros((config.num_head,), jnp.int32)
    plan = Plan(
        preempt=runs,
        swap=jnp.zeros_like(runs),
        places=none,
        num_rows=none,
        admit=jnp.zeros(head.shape, bool),
        head_places=head,
        head_rows=head,
        drafts=none if config.max_drafts else None,
    )
    no_pages = jnp.full((head.shape[0], config.max_pages_per_slot), NO_PAGE, jnp.int32)
    prefix_match = paging.PrefixMatch(no_pages, head, head)
    state, _ = _preempt_and_admit(
        (state, _unchanged_batch(state, plan)),
        plan,
        prefix_match,
        config=config,
        eviction=eviction,
        kinds=ALL_KINDS,
    )
    if (cache := state.prefixes) is not None:
        page = jnp.arange(config.num_pages, dtype=jnp.int32)
        cached = jnp.where(cache.pinned, page, NO_PAGE)
        state = state._replace(
            pool=release_counted(state.pool, cached)[0],
            prefixes=make_prefix_cache(config.num_pages, config.page_size),
        )
        state = paging.forget_checkpoints(state)
        state = paging.forget_windows_of_prefixes(state)
    if (staging := state.staging) is None:
        return state
    every = jnp.ones(state.sequences.group.shape, bool)
    state = paging.forget_swapped_states(state, every)
    state = paging.forget_swapped_windows(state, every)
    empty = make_staging(
        state.pages,
        num_places=0,
        num_sequences=staging.page_ids.shape[0],
        pages_per_slot=staging.page_ids.shape[1],
    )
    owner = jnp.full_like(staging.owner, NO_SEQUENCE)
    return state._replace(
        staging=empty._replace(pages=staging.pages, owner=owner),
        ledger=paging.clear_swapped(state.ledger, every),
    )


def _reserve(
    state: EngineState,
    batch: _Batch,
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, ""], Bool[Array, ""]]:
    """Reserves the planned token places, and copies shared pages before a write.

    Returns:
      The new state, the number of pages copied, and True if there were enough pages.
    """
    size, (places, num_rows, drafts) = config.page_size, batch.plan
    if drafts is not None:
        places = places + drafts
        num_rows = num_rows + drafts
    wanted = num_new_pages(state.pool, state.table, places, num_rows, page_size=size)
    if batch.num_back is not None:
        wanted += batch.num_back
    state = paging.evict_until_free(state, wanted)
    if batch.back is not None:
        state = paging.swap_in(state, batch.back)
    pool, table, copies, enough = memory.reserve(
        state.pool,
        state.table,
        places,
        num_rows,
        page_size=size,
        max_new_pages=config.max_pages_per_slot,
    )
    pages = memory.copy(state.pages, copies.source, copies.target)
    num_copied = jnp.sum(copies.source >= 0, dtype=jnp.int32)
    return state._replace(pages=pages, pool=pool, table=table), num_copied, enough
