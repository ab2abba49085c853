"""Carrying out a plan: who is preempted, who gets a slot, which pages they get."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.engine import (
    beam_search,
    groups,
    prefix_caching,
    requests,
    slot_assignment,
    swapping,
)
from jaxkv.engine.slot_assignment import Assignment
from jaxkv.engine.state import NOBODY, RUNNING, WAITING, EngineConfig, EngineState
from jaxkv.memory import Eviction, kv_pages, page_table
from jaxkv.scheduling import interface


class Turned(NamedTuple):
    """How many came and went in a step."""

    num_preempted: Int32[Array, ""]
    """Sequences that lost their slots."""
    num_swapped_out: Int32[Array, ""]
    """How many of these had pages that left the pool."""
    num_swapped_in: Int32[Array, ""]
    """Sequences whose pages came back."""
    num_admitted: Int32[Array, ""]
    """Requests whose sequences got slots."""


class Applied(NamedTuple):
    """What carrying out a plan came to."""

    turned: Turned
    num_rows: Int32[Array, " slots"]
    """Rows of each slot, drafts apart; none if there were not enough pages."""
    granted: Int32[Array, " slots"] | None
    """Drafts that each slot may feed behind them; None if there is no drafter."""
    kept: Int32[Array, " slots"]
    """Token places that each slot holds, those for drafts apart."""
    num_copied: Int32[Array, ""]
    """Pages copied because they are about to be written."""
    enough: Bool[Array, ""]
    """Whether there were pages for all places asked for."""


class _Batch(NamedTuple):
    """What the slots do, once it is settled who has one."""

    places: Int32[Array, " slots"]
    """Token places that each shall have."""
    num_rows: Int32[Array, " slots"]
    """Rows that it feeds, drafts apart."""
    turned: Int32[Array, " counts"]
    """The fields of `Turned`."""
    back: Int32[Array, " head"] | None
    """If there is a staging buffer: requests that were swapped out and have slots
    again, by the rows of their first sequences; NOBODY for all others."""
    num_back: Int32[Array, ""] | None
    """Pages that these take."""


def apply_plan(
    state: EngineState,
    plan: interface.Plan,
    found: prefix_caching.Found,
    config: EngineConfig,
    eviction: Eviction | None = None,
) -> tuple[EngineState, Applied]:
    """Preempts, admits, reserves, and copies what is about to be written.

    `found` is what the requests at the head of the queue would start on.

    Returns:
      The new state, in which all pages that the step writes are there, and what
      happened.
    """
    place = arrays.inverse(state.slots.order)
    # Padded to one length: a reduction of each, or of both joined, is another launch.
    size = max(plan.preempt.shape[0], plan.admit.shape[0])
    preempt, admit = (
        jnp.pad(x, (0, size - x.shape[0])) for x in (plan.preempt, plan.admit)
    )
    turns = jnp.any(preempt | admit)
    with jax.named_scope("turn_over"):
        staged = state.staging is not None
        # The batch if no sequence is preempted or admitted.
        batch = _Batch(
            places=plan.places[place],
            num_rows=plan.num_rows[place],
            turned=jnp.zeros((len(Turned._fields),), jnp.int32),
            back=jnp.full(plan.admit.shape, NOBODY, jnp.int32) if staged else None,
            num_back=jnp.zeros((), jnp.int32) if staged else None,
        )
        state, batch = arrays.when(
            turns,
            functools.partial(_turn_over, config=config, eviction=eviction),
            (state, batch),
            plan,
            place,
            found,
        )
    granted = None if plan.drafts is None else plan.drafts[place]
    table = state.table
    state, num_copied, enough = _reserve(state, batch, granted, config)
    return state, Applied(
        turned=Turned(*batch.turned),
        num_rows=jnp.where(enough, batch.num_rows, 0),
        granted=None if granted is None else jnp.where(enough, granted, 0),
        kept=jnp.maximum(table.length + table.ahead, batch.places),
        num_copied=num_copied,
        enough=enough,
    )


def _turn_over(
    carry: tuple[EngineState, _Batch],
    plan: interface.Plan,
    place: Int32[Array, " slots"],
    found: prefix_caching.Found,
    *,
    config: EngineConfig,
    eviction: Eviction | None,
) -> tuple[EngineState, _Batch]:
    """Preempts and admits: what nearly all steps do without."""
    state, batch = carry
    state, requeued, leaves = _preempt(state, plan, place, config, eviction)
    state, back, num_back, a = _admit(state, plan, requeued, config)

    def with_new(of_slots: Array, of_head: Array) -> Array:
        return arrays.put(of_slots, a.first, jnp.where(back >= 0, 0, of_head))

    turned = Turned(
        num_preempted=jnp.sum(plan.preempt, dtype=jnp.int32),
        num_swapped_out=jnp.sum(leaves, dtype=jnp.int32),
        num_swapped_in=jnp.sum(jnp.where(back >= 0, a.size, 0), dtype=jnp.int32),
        num_admitted=jnp.sum(a.size > 0, dtype=jnp.int32),
    )
    staged = state.staging is not None
    return prefix_caching.start(state, found, a.first), _Batch(
        places=with_new(batch.places, plan.head_places),
        num_rows=with_new(batch.num_rows, plan.head_rows),
        turned=jnp.stack(turned),
        back=back if staged else None,
        num_back=num_back if staged else None,
    )


def _preempt(
    state: EngineState,
    plan: interface.Plan,
    place: Int32[Array, " slots"],
    config: EngineConfig,
    eviction: Eviction | None,
) -> tuple[EngineState, Int32[Array, " order"], Bool[Array, " slots"]]:
    """Takes slots and pages from those who are preempted.

    Returns:
      The new state; the requests that wait again, in order of admission; and the slots
      whose pages were swapped out.
    """
    preempted, group = plan.preempt[place], groups.groups_in_order(state)
    state = beam_search.note_paths(state, preempted, config)
    state = groups.note_common(state, plan.preempt, group)
    state, leaves = swapping.move_out(state, (plan.swap & plan.preempt)[place], config)
    state = prefix_caching.drop(state, preempted, eviction)
    s, slots = state.sequences, state.slots
    losers = jnp.where(preempted, slots.sequence, NOBODY)
    moved = jnp.where(leaves, slots.sequence, NOBODY)
    # A group that is preempted waits as one.
    leads = plan.preempt & (group == jnp.arange(group.shape[0], dtype=jnp.int32))
    first = jnp.where(leads, slots.sequence[slots.order], NOBODY)
    return (
        state._replace(
            sequences=s._replace(
                status=arrays.put(s.status, losers, WAITING),
                num_preempted=arrays.put(s.num_preempted, losers, 1, "add"),
                num_swapped=arrays.put(s.num_swapped, moved, 1, "add"),
            ),
            slots=slots._replace(
                sequence=jnp.where(preempted, NOBODY, slots.sequence),
                source=jnp.where(preempted, NOBODY, slots.source),
                num_common=jnp.where(preempted, 0, slots.num_common),
            ),
        ),
        arrays.take(s.group, first, fill=NOBODY),
        leaves,
    )


def _admit(
    state: EngineState,
    plan: interface.Plan,
    requeued: Int32[Array, " order"],
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, " head"], Int32[Array, ""], Assignment]:
    """Gives slots to the sequences of admitted requests, and closes up the queue.

    Returns:
      The new state; of the requests at the head those that were swapped out and are
      back, by the rows of their first sequences, and the pages that these take; and who
      got which slot.
    """
    s, slots, queue = state.sequences, state.slots, state.queue
    head = queue.sequence[: config.num_head]
    admit, back, num_back = swapping.coming_back(state, plan.admit, head)
    occupied = (slots.sequence >= 0) | slots.held
    a = slot_assignment.assign(state, admit, head, occupied)
    # Who has pages to come back to was forked before; others wait for their reader.
    waits = (a.slot != a.reader) & (a.row >= 0)
    waits &= ~arrays.take(swapping.has_pages(state), a.row, fill=False)
    source = jnp.where(waits, a.reader, NOBODY)
    followed = jnp.any((a.first[:, None] == source[None, :]) & waits[None, :], axis=1)
    common = jnp.where(followed, arrays.take(s.num_common, head, fill=0), 0)
    state = state._replace(
        sequences=s._replace(status=arrays.put(s.status, a.row, RUNNING)),
        slots=slots._replace(
            sequence=arrays.put(slots.sequence, a.slot, a.row),
            source=arrays.put(slots.source, a.slot, source),
            num_common=arrays.put(slots.num_common, a.first, common),
            order=a.order,
        ),
        queue=requests.requeue(queue, requeued, a.size > 0),
    )
    return state, jnp.where(back, head, NOBODY), num_back, a


def _reserve(
    state: EngineState,
    batch: _Batch,
    granted: Int32[Array, " slots"] | None,
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, ""], Bool[Array, ""]]:
    """Makes room for the places asked for, and parts those that others share.

    Returns:
      The new state, the number of pages copied, and whether there was room.
    """
    size, places, num_rows = config.page_size, batch.places, batch.num_rows
    if granted is not None:
        places, num_rows = places + granted, num_rows + granted
    wanted = page_table.num_wanted(
        state.pool, state.table, places, num_rows, page_size=size
    )
    if batch.num_back is not None:
        wanted += batch.num_back
    state = prefix_caching.make_room(state, wanted)
    if batch.back is not None:
        state = swapping.move_in(state, batch.back)
    pool, table, copies, enough = page_table.reserve(
        state.pool,
        state.table,
        places,
        num_rows,
        page_size=size,
        max_new_pages=config.max_pages_per_slot,
    )
    pages = kv_pages.copy(state.pages, copies.source, copies.target)
    num_copied = jnp.sum(copies.source >= 0, dtype=jnp.int32)
    return state._replace(pages=pages, pool=pool, table=table), num_copied, enough
