"""Carrying out a plan: who gives way, who gets a slot, which pages they get."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import (
    caching,
    forking,
    paging,
    queueing,
    scheduling,
    searching,
    sharing,
    tables,
)
from jaxkv.states import NOBODY, RUNNING, WAITING, EngineConfig, EngineState


def counts(
    state: EngineState, config: EngineConfig
) -> tuple[scheduling.Counts, sharing.Found]:
    """What the policy may know, in order of the line and of the queue.

    And what the requests at the head of the queue would start on.
    """
    s, slots, line = state.sequences, state.slots, state.slots.line
    size = config.page_size
    sequence, length = slots.sequence[line], state.table.length[line]
    head = state.queue.sequence[: config.max_slots]

    def of(values: Array, rows: Array) -> Array:
        return paging.take(values, rows, fill=0)

    first = forking.first_of_group(state)
    every = jnp.arange(config.max_slots, dtype=jnp.int32)
    place = jnp.zeros_like(line).at[line].set(every, unique_indices=True)
    goal = forking.num_to_feed(state)
    copies = tables.needs_copy(
        state.pool, state.table, goal - state.table.length, page_size=size
    )
    arrival = of(s.arrival, head)
    seconds, micros = state.clock[0], state.clock[1]
    arrived = (arrival[:, 0] < seconds) | (
        (arrival[:, 0] == seconds) & (arrival[:, 1] <= micros)
    )
    # Of each waiting request: its sequences, the one that feeds first, and their pages.
    waits = _members(state, head)
    waiting_slots = jnp.sum(waits, axis=1, dtype=jnp.int32)
    reader = jnp.argmax(waits, axis=1).astype(jnp.int32)
    alone = waiting_slots == 1
    num_tokens = jnp.where(alone, s.num_tokens[reader], of(s.num_common, head))
    full = jnp.where(alone, 0, num_tokens // size)
    tails = tables.pages_for(s.num_tokens, page_size=size)
    tails = jnp.where(waits, tails[None, :] - full[:, None], 0)
    waiting = (head >= 0) & arrived
    found = sharing.find(state, reader, num_tokens, waiting, config)
    owned = tables.owned_pages(state.pool, state.table, first, pins=sharing.pins(state))
    return scheduling.Counts(
        running=sequence >= 0,
        held=slots.held[line],
        group=place[first[line]],
        num_tokens=goal[line],
        length=length,
        num_pages=tables.num_pages(state.table, page_size=size)[line],
        owned_pages=owned[line],
        copies=copies[line].astype(jnp.int32),
        scored_prompt=of(s.prompt_scored, sequence)
        & (length < of(s.prompt_length, sequence)),
        waiting=waiting,
        waiting_tokens=num_tokens,
        waiting_cached=found.num_tokens,
        waiting_slots=waiting_slots,
        waiting_pages=full
        + jnp.sum(tails, axis=1, dtype=jnp.int32)
        - found.num_tokens // size
        + found.num_idle,
        waiting_scored_prompt=s.prompt_scored[reader] & (head >= 0),
        free_pages=state.pool.num_free + sharing.num_idle(state),
        page_size=size,
        max_length=config.max_length,
        token_budget=config.token_budget,
        spare_logit_rows=config.num_logit_rows - config.max_slots,
    ), found


def used_places(state: EngineState, config: EngineConfig) -> Int32[Array, ""]:
    """Token places that hold K and V; those of several sequences count once."""
    table, size = state.table, config.page_size
    # Sequences of a group are equal where they share pages, the last one included.
    first, pins = forking.first_of_group(state), sharing.pins(state)
    owned = tables.owned_pages(state.pool, table, first, pins=pins)
    others = tables.num_pages(table, page_size=size) - owned
    own = jnp.sum(jnp.maximum(table.length - others * size, 0), dtype=jnp.int32)
    if pins is None:
        return own
    return own + size * jnp.sum((pins > 0) & (state.pool.ref > 1), dtype=jnp.int32)


class _Seats(NamedTuple):
    """Which slots the sequences of admitted requests get: free ones, in order."""

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


def carry_out(
    state: EngineState,
    plan: scheduling.Plan,
    found: sharing.Found,
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, " slots"], Int32[Array, ""], Bool[Array, ""]]:
    """Preempts, admits, reserves, and copies what is about to be written.

    Returns:
      The new state, the rows of each slot, how many pages were copied, and whether
      there were enough pages; if not, nobody has any rows.
    """
    line = state.slots.line

    def by_slot(values: Array) -> Array:
        return jnp.zeros_like(values).at[line].set(values, unique_indices=True)

    preempted = by_slot(plan.preempt)
    state = searching.note_paths(state, preempted, config)
    state = sharing.let_go(forking.note_common(state, preempted), preempted)
    pool, table = tables.drop(state.pool, state.table, preempted)
    s, slots, queue = state.sequences, state.slots, state.queue
    # A group that gives way waits as one, in order of the line.
    losers = jnp.where(plan.preempt, slots.sequence[line], NOBODY)
    leads = forking.first_of_group(state)[line] == line
    groups = paging.take(s.group, jnp.where(leads, losers, NOBODY), fill=NOBODY)
    sequence = jnp.where(preempted, NOBODY, slots.sequence)
    occupied = (sequence >= 0) | slots.held
    head = queue.sequence[: config.max_slots]
    seats = _seat(state, plan.admit, head, ~occupied)
    rows = jnp.arange(s.status.shape[0], dtype=jnp.int32)

    def seat(values: Array, new: Array) -> Array:
        return paging.put(values, seats.slot, new, "set")

    def lead(values: Array, new: Array) -> Array:
        return paging.put(values, seats.first, new, "set")

    places = lead(by_slot(plan.places), plan.head_places)
    num_rows = lead(by_slot(plan.num_rows), plan.head_rows)
    sequence = seat(sequence, rows)
    waits = jnp.where(seats.slot == seats.reader, NOBODY, seats.reader)
    common = jnp.where(seats.size > 1, paging.take(s.num_common, head, fill=0), 0)
    # The line: who stays, who is new, and the empty slots behind them.
    every = jnp.arange(config.max_slots, dtype=jnp.int32)
    still_free = jnp.where(occupied | (sequence >= 0), NOBODY, every)
    new_line = jnp.concatenate([jnp.where(occupied[line], line, NOBODY), seats.taken])
    new_line = jnp.concatenate([new_line, still_free])
    admitted = jnp.pad(seats.size > 0, (0, queue.sequence.shape[0] - head.shape[0]))
    waiting = jnp.where(admitted, NOBODY, queue.sequence)
    status = paging.put(s.status, losers, WAITING, "set")
    status = jnp.where(seats.slot >= 0, RUNNING, status)
    state = state._replace(
        pool=pool,
        table=table,
        sequences=s._replace(status=status),
        slots=slots._replace(
            sequence=sequence,
            source=seat(jnp.where(preempted, NOBODY, slots.source), waits),
            num_common=lead(jnp.where(preempted, 0, slots.num_common), common),
            line=_packed(new_line)[: config.max_slots],
        ),
        queue=queueing.pack_queue(
            jnp.concatenate([groups, waiting]), queue.sequence.shape[0]
        ),
    )
    state = sharing.start(state, found, seats.first)
    sizes = {"page_size": config.page_size}
    wanted = tables.num_wanted(state.pool, state.table, places, num_rows, **sizes)
    state = sharing.make_room(state, wanted, config)
    pool, table, copies, enough = tables.reserve(
        *(state.pool, state.table, places, num_rows),
        **sizes,
        max_new_pages=config.max_pages_per_slot,
    )
    pages = caching.copy(state.pages, copies.source, copies.target)
    return (
        state._replace(pages=pages, pool=pool, table=table),
        jnp.where(enough, num_rows, 0),
        jnp.sum(copies.source >= 0, dtype=jnp.int32),
        enough,
    )


def _members(
    state: EngineState, head: Int32[Array, " head"]
) -> Bool[Array, "head sequences"]:
    """Which sequences wait for a slot with each request."""
    s = state.sequences
    mine = (s.group[None, :] == head[:, None]) & (head >= 0)[:, None]
    return mine & (s.status == WAITING)[None, :]


def _seat(
    state: EngineState,
    admit: Bool[Array, " head"],
    head: Int32[Array, " head"],
    free: Bool[Array, " slots"],
) -> _Seats:
    """Gives the k-th sequence of those admitted the k-th free slot."""
    every = jnp.arange(free.shape[0], dtype=jnp.int32)
    order = _packed(jnp.where(free, every, NOBODY))
    waits = _members(state, head) & admit[:, None]
    size = jnp.sum(waits, axis=1, dtype=jnp.int32)
    start = jnp.cumsum(size, dtype=jnp.int32) - size
    within = jnp.cumsum(waits, axis=1, dtype=jnp.int32) - 1
    rank = jnp.max(jnp.where(waits, start[:, None] + within, NOBODY), axis=0)
    first = jnp.max(jnp.where(waits, start[:, None], NOBODY), axis=0)
    return _Seats(
        slot=paging.take(order, rank, fill=NOBODY),
        reader=paging.take(order, first, fill=NOBODY),
        first=paging.take(order, jnp.where(size > 0, start, NOBODY), fill=NOBODY),
        size=size,
        taken=jnp.where(every < jnp.sum(size, dtype=jnp.int32), order, NOBODY),
    )


def _packed(values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The values side by side, in order; NOBODY, wherever it stood, behind them."""
    keep = values >= 0
    place = jnp.where(keep, jnp.cumsum(keep, dtype=jnp.int32) - 1, NOBODY)
    return paging.put(jnp.full_like(values, NOBODY), place, values, "set")
