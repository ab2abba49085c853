"""Carrying out a plan: who is preempted, who gets a slot, which pages they get."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
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


class Applied(NamedTuple):
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


class _Admission(NamedTuple):
    """Who of the requests at the head of the queue comes in."""

    head: Int32[Array, " head"]
    """The requests, by the rows of their first sequences."""
    back: Bool[Array, " head"]
    """Those who were swapped out and are back."""
    num_back: Int32[Array, ""]
    """Pages that these take."""
    assigned: Assignment


def apply_plan(
    state: EngineState,
    plan: interface.Plan,
    counts: interface.Counts,
    found: prefix_caching.Found,
    config: EngineConfig,
    eviction: Eviction | None = None,
) -> tuple[EngineState, Applied]:
    """Preempts, admits, reserves, and copies what is about to be written.

    `counts` are what the policy decided on, `found` what the requests at the head of
    the queue would start on.

    Returns:
      The new state, in which all pages that the step writes are there, and what
      happened.
    """
    if state.prefixes is not None:
        # Read before anybody lets go of pages: XLA, seeing no order, copies the cache.
        plan, found = lax.optimization_barrier((plan, found))
    place = arrays.inverse(state.slots.line)
    group = counts.group
    assert group is not None  # only a simulation does without
    state, requeued, leaves = _preempt(state, plan, group, place, config, eviction)
    state, admission = _admit(state, plan, requeued, config)
    back, assigned = admission.back, admission.assigned

    def by_slot(of_line: Array, of_head: Array) -> Array:
        new = jnp.where(back, 0, of_head)
        return arrays.put(of_line[place], assigned.first, new)

    places = by_slot(plan.places, plan.head_places)
    num_rows = by_slot(plan.num_rows, plan.head_rows)
    state = prefix_caching.start(state, found, assigned.first)
    state, num_copied, enough = _reserve(state, admission, places, num_rows, config)
    return state, Applied(
        num_rows=jnp.where(enough, num_rows, 0),
        num_admitted=jnp.sum(assigned.size > 0, dtype=jnp.int32),
        num_swapped_out=jnp.sum(leaves, dtype=jnp.int32),
        num_swapped_in=jnp.sum(jnp.where(back, assigned.size, 0), dtype=jnp.int32),
        num_copied=num_copied,
        enough=enough,
    )


def _preempt(
    state: EngineState,
    plan: interface.Plan,
    group: Int32[Array, " line"],
    place: Int32[Array, " slots"],
    config: EngineConfig,
    eviction: Eviction | None,
) -> tuple[EngineState, Int32[Array, " line"], Bool[Array, " slots"]]:
    """Takes slots and pages from those who are preempted.

    Returns:
      The new state; the requests that wait again, in order of the line; and the slots
      whose pages were swapped out.
    """
    preempted = plan.preempt[place]
    state = beam_search.note_paths(state, preempted, config)
    state = groups.note_common(state, plan.preempt, group)
    state, leaves = swapping.move_out(state, (plan.swap & plan.preempt)[place], config)
    state = prefix_caching.drop(state, preempted, eviction)
    s, slots = state.sequences, state.slots
    losers = jnp.where(preempted, slots.sequence, NOBODY)
    moved = jnp.where(leaves, slots.sequence, NOBODY)
    # A group that is preempted waits as one.
    leads = plan.preempt & (group == jnp.arange(group.shape[0], dtype=jnp.int32))
    first = jnp.where(leads, slots.sequence[slots.line], NOBODY)
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
    requeued: Int32[Array, " line"],
    config: EngineConfig,
) -> tuple[EngineState, _Admission]:
    """Gives slots to the sequences of admitted requests, and closes up the queue."""
    s, slots, queue = state.sequences, state.slots, state.queue
    head = queue.sequence[: config.max_slots]
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
            line=a.line,
        ),
        queue=requests.requeue(queue, requeued, a.size > 0),
    )
    return state, _Admission(head, back, num_back, a)


def _reserve(
    state: EngineState,
    admission: _Admission,
    places: Int32[Array, " slots"],
    num_rows: Int32[Array, " slots"],
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, ""], Bool[Array, ""]]:
    """Makes room for the places asked for, and parts those that others share.

    Returns:
      The new state, the number of pages copied, and whether there was room.
    """
    size, a = config.page_size, admission.assigned
    wanted = page_table.num_wanted(
        state.pool, state.table, places, num_rows, page_size=size
    )
    state = prefix_caching.make_room(state, wanted + admission.num_back)
    state = swapping.move_in(state, admission.back, admission.head, a.row, a.slot)
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
