"""Carrying out a plan: who gives way, who gets a slot, which pages they get."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv.engine import (
    beam_search,
    prefix_caching,
    requests,
    slot_assignment,
    swapping,
)
from jaxkv.engine.groups import first_of_group, note_common, num_to_feed
from jaxkv.engine.state import NOBODY, RUNNING, WAITING, EngineConfig, EngineState
from jaxkv.memory import Eviction, kv_pages, page_pool, page_sharing, page_table
from jaxkv.scheduling import interface


def counts(
    state: EngineState, config: EngineConfig
) -> tuple[interface.Counts, prefix_caching.Found]:
    """What the policy may know, in order of the line and of the queue.

    And what the requests at the head of the queue would start on.
    """
    s, slots, line = state.sequences, state.slots, state.slots.line
    size = config.page_size
    sequence, length = slots.sequence[line], state.table.length[line]
    head = state.queue.sequence[: config.max_slots]

    def of(values: Array, rows: Array) -> Array:
        return page_pool.take(values, rows, fill=0)

    first = first_of_group(state)
    holder = page_sharing.holders(state.table, first)
    every = jnp.arange(config.max_slots, dtype=jnp.int32)
    place = jnp.zeros_like(line).at[line].set(every, unique_indices=True)
    goal = num_to_feed(state)
    copies = page_table.needs_copy(
        state.pool, state.table, goal - state.table.length, page_size=size
    )
    arrival = of(s.arrival, head)
    seconds, micros = state.clock[0], state.clock[1]
    arrived = (arrival[:, 0] < seconds) | (
        (arrival[:, 0] == seconds) & (arrival[:, 1] <= micros)
    )
    # Of each waiting request: its sequences, the one that feeds first, and their pages.
    waits = slot_assignment.members(state, head)
    waiting_slots = jnp.sum(waits, axis=1, dtype=jnp.int32)
    reader = jnp.argmax(waits, axis=1).astype(jnp.int32)
    alone = waiting_slots == 1
    num_tokens = jnp.where(alone, s.num_tokens[reader], of(s.num_common, head))
    full = jnp.where(alone, 0, num_tokens // size)
    tails = page_table.pages_for(s.num_tokens, page_size=size)
    tails = jnp.where(waits, tails[None, :] - full[:, None], 0)
    out = swapping.is_out(state, head)
    waiting = (head >= 0) & arrived & ~swapping.on_host(state, head)
    found = prefix_caching.find(state, reader, num_tokens, waiting & ~out, config)
    owned = page_sharing.owned_pages(
        state.table, holder, pins=prefix_caching.pins(state)
    )
    pages = page_table.num_pages(state.table, page_size=size)
    moves = swapping.num_to_move(state, holder, page_size=size)
    return interface.Counts(
        running=sequence >= 0,
        held=slots.held[line],
        group=place[first[line]],
        num_tokens=goal[line],
        length=length,
        num_pages=pages[line],
        owned_pages=owned[line],
        owned_tokens=_own(state.table.length, pages - owned, size)[line],
        swap_pages=moves[line],
        copies=copies[line].astype(jnp.int32),
        preempted=of(s.num_preempted, sequence) > 0,
        scored_prompt=of(s.prompt_scored, sequence)
        & (length < of(s.prompt_length, sequence)),
        waiting=waiting,
        waiting_tokens=num_tokens,
        waiting_cached=found.num_tokens,
        waiting_slots=waiting_slots,
        waiting_pages=jnp.where(
            out,
            swapping.num_wanted(state, head, waits, config),
            full
            + jnp.sum(tails, axis=1, dtype=jnp.int32)
            - found.num_tokens // size
            + found.num_idle,
        ),
        waiting_preempted=(head >= 0) & (s.num_preempted[reader] > 0),
        waiting_swapped=out,
        waiting_scored_prompt=s.prompt_scored[reader] & (head >= 0),
        free_pages=state.pool.num_free + prefix_caching.num_idle(state),
        free_swap_pages=swapping.num_free(state),
        page_size=size,
        max_length=config.max_length,
        token_budget=config.token_budget,
        spare_logit_rows=config.num_logit_rows - config.max_slots,
    ), found


def used_places(state: EngineState, config: EngineConfig) -> Int32[Array, ""]:
    """Token places that hold K and V; those of several sequences count once."""
    table, size = state.table, config.page_size
    # Sequences of a group are equal where they share pages, the last one included.
    holder = page_sharing.holders(table, first_of_group(state))
    owned = page_sharing.owned_pages(table, holder, pins=prefix_caching.pins(state))
    others = page_table.num_pages(table, page_size=size) - owned
    own = jnp.sum(_own(table.length, others, size), dtype=jnp.int32)
    return own + size * prefix_caching.num_used(state)


def _own(length: Array, others: Array, page_size: int) -> Array:
    """Tokens of each slot beyond those on pages that others account for."""
    return jnp.maximum(length - others * page_size, 0)


class Done(NamedTuple):
    """What carrying out a plan came to."""

    num_rows: Int32[Array, " slots"]
    """Rows of each slot; none if there were not enough pages."""
    num_admitted: Int32[Array, ""]
    """Requests whose sequences got slots."""
    num_swapped_out: Int32[Array, ""]
    """Sequences whose pages left the pool."""
    num_swapped_in: Int32[Array, ""]
    """Sequences whose pages came back."""
    num_copied: Int32[Array, ""]
    """Pages copied because they are about to be written."""
    enough: Bool[Array, ""]
    """Whether there were pages for all places asked for."""


def carry_out(
    state: EngineState,
    plan: interface.Plan,
    found: prefix_caching.Found,
    config: EngineConfig,
    eviction: Eviction | None = None,
) -> tuple[EngineState, Done]:
    """Preempts, admits, reserves, and copies what is about to be written."""
    if state.prefixes is not None:
        # Read before anybody lets go of pages: XLA, seeing no order, copies the cache.
        plan, found = lax.optimization_barrier((plan, found))
    line = state.slots.line

    def by_slot(values: Array) -> Array:
        return jnp.zeros_like(values).at[line].set(values, unique_indices=True)

    preempted = by_slot(plan.preempt)
    state = beam_search.note_paths(state, preempted, config)
    state = note_common(state, preempted)
    state, leaves = swapping.move_out(state, by_slot(plan.swap) & preempted, config)
    state = prefix_caching.drop(state, preempted, eviction)
    s, slots, queue = state.sequences, state.slots, state.queue
    # A group that gives way waits as one, in order of the line.
    losers = jnp.where(plan.preempt, slots.sequence[line], NOBODY)
    leads = first_of_group(state)[line] == line
    groups = page_pool.take(s.group, jnp.where(leads, losers, NOBODY), fill=NOBODY)
    sequence = jnp.where(preempted, NOBODY, slots.sequence)
    occupied = (sequence >= 0) | slots.held
    head = queue.sequence[: config.max_slots]
    admit, back, num_back = swapping.coming_back(state, plan.admit, head)
    seats = slot_assignment.seat(state, admit, head, ~occupied)
    rows = jnp.arange(s.status.shape[0], dtype=jnp.int32)

    def seat(values: Array, new: Array) -> Array:
        return page_pool.put(values, seats.slot, new, "set")

    def lead(values: Array, new: Array) -> Array:
        return page_pool.put(values, seats.first, jnp.where(back, 0, new), "set")

    places = lead(by_slot(plan.places), plan.head_places)
    num_rows = lead(by_slot(plan.num_rows), plan.head_rows)
    sequence = seat(sequence, rows)
    # Who has pages to come back to was forked before.
    waits = (seats.slot != seats.reader) & ~swapping.has_pages(state)
    waits = jnp.where(waits, seats.reader, NOBODY)
    common = jnp.where(seats.size > 1, page_pool.take(s.num_common, head, fill=0), 0)
    read = page_pool.put(jnp.zeros_like(slots.sequence), waits, 1, "add") > 0
    common = jnp.where(page_pool.take(read, seats.first, fill=False), common, 0)
    # The line: who stays, who is new, and the empty slots behind them.
    every = jnp.arange(config.max_slots, dtype=jnp.int32)
    still_free = jnp.where(occupied | (sequence >= 0), NOBODY, every)
    new_line = jnp.concatenate([jnp.where(occupied[line], line, NOBODY), seats.taken])
    new_line = jnp.concatenate([new_line, still_free])
    admitted = jnp.pad(seats.size > 0, (0, queue.sequence.shape[0] - head.shape[0]))
    waiting = jnp.where(admitted, NOBODY, queue.sequence)
    status = page_pool.put(s.status, losers, WAITING, "set")
    status = jnp.where(seats.slot >= 0, RUNNING, status)
    moved = jnp.where(leaves, slots.sequence, NOBODY)
    state = state._replace(
        sequences=s._replace(
            status=status,
            num_preempted=page_pool.put(s.num_preempted, losers, 1, "add"),
            num_swapped=page_pool.put(s.num_swapped, moved, 1, "add"),
        ),
        slots=slots._replace(
            sequence=sequence,
            source=seat(jnp.where(preempted, NOBODY, slots.source), waits),
            num_common=page_pool.put(
                jnp.where(preempted, 0, slots.num_common), seats.first, common, "set"
            ),
            line=page_pool.packed(new_line)[: config.max_slots],
        ),
        queue=requests.pack_queue(
            jnp.concatenate([groups, waiting]), queue.sequence.shape[0]
        ),
    )
    state = prefix_caching.start(state, found, seats.first)
    sizes = {"page_size": config.page_size}
    wanted = page_table.num_wanted(state.pool, state.table, places, num_rows, **sizes)
    state = prefix_caching.make_room(state, wanted + num_back)
    state = swapping.move_in(state, back, head, seats.slot)
    pool, table, copies, enough = page_table.reserve(
        *(state.pool, state.table, places, num_rows),
        **sizes,
        max_new_pages=config.max_pages_per_slot,
    )
    pages = kv_pages.copy(state.pages, copies.source, copies.target)
    return state._replace(pages=pages, pool=pool, table=table), Done(
        num_rows=jnp.where(enough, num_rows, 0),
        num_admitted=jnp.sum(seats.size > 0, dtype=jnp.int32),
        num_swapped_out=jnp.sum(leaves, dtype=jnp.int32),
        num_swapped_in=jnp.sum(jnp.where(back, seats.size, 0), dtype=jnp.int32),
        num_copied=jnp.sum(copies.source >= 0, dtype=jnp.int32),
        enough=enough,
    )
