"""What the policy of a simulation is told: who runs, and who waits at the head.

The counts are those of `counts.counts`, made of what a simulation knows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkv.engine import NOBODY
from jaxkv.memory import demand
from jaxkv.scheduling import attributes, interface
from jaxkv.simulation import batch, contiguous
from jaxkv.simulation.batch import Sharing, Slots
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.state import Capacity, Events, Progress, Queued, Simulation
from jaxkv.workloads import Workload


def look(state: Simulation, workload: Workload, head: int, max_samples: int) -> Queued:
    """Looks up who waits at the head of the queue."""
    request = state.queue[:head]
    row = jnp.maximum(request, 0)
    sample = jnp.arange(max_samples, dtype=jnp.int32)
    sequence = row[:, None] * max_samples + sample[None, :]
    was = Progress(*jnp.moveaxis(state.progress[sequence], -1, 0))
    prompt = workload.prompt[row][:, None]
    alive = jnp.broadcast_to((request >= 0)[:, None], sequence.shape)
    is_reader, sharing = alive, None
    if max_samples > 1:
        finish = state.events[sequence, Events._fields.index("finish_s")]
        alive &= (finish == 0) & (sample[None, :] < workload.samples[row][:, None])
        before = jnp.cumsum(alive, axis=1, dtype=jnp.int32)
        # Only the first sequence feeds. Those that have pages were forked before; the
        # rest wait for the first, which reads.
        is_reader, is_in = alive & (before == 1), was.swapped_length == 0
        waits = alive & ~is_reader & is_in
        reads = is_reader & jnp.any(waits, axis=1, keepdims=True)
        shares = waits | reads | ((before[:, -1:] > 1) & is_in)
        sharing = Sharing(
            common=jnp.where(shares, jnp.broadcast_to(prompt, alive.shape), was.common),
            reads=reads,
            waits=waits,
            forked=was.swapped_length > 0,
        )
    holds = state.slots.held is not None
    slots = Slots(
        sequence=jnp.where(alive, sequence, NOBODY),
        length=was.swapped_length,
        places=was.swapped_length,
        known=jnp.maximum(prompt, was.known),
        # Nothing of what was swapped out is lost.
        fed=jnp.where(was.swapped_length > 0, 0, was.fed),
        returned=was.returned > 0,
        held=jnp.zeros_like(alive) if holds else None,
        sharing=sharing,
        block=None,
    )
    pages_out = jnp.where(alive, was.swapped_pages, 0)
    return Queued(
        request=request,
        slots=slots,
        is_reader=is_reader,
        pages_out=jnp.sum(pages_out, axis=1, dtype=jnp.int32),
        swapped_length=was.swapped_length,
        is_seen=request >= 0,
    )


def reserve(
    state: Simulation,
    queued: Queued,
    workload: Workload,
    capacity: Capacity,
    reservation: Reservation,
) -> Queued:
    """Finds contiguous places for those who wait; who gets none is not seen.

    They keep them if the policy lets them in, and never ask for more.
    """
    slots, size = state.slots, capacity.page_size
    assert slots.block is not None
    blocks = jnp.where(slots.sequence >= 0, slots.block, NOBODY)
    leaves = demand.pages_for(slots.places, page_size=size)
    free = contiguous.free_leaves(reservation.idle, blocks, leaves)
    row = jnp.maximum(queued.request, 0)
    asked = contiguous.asked(
        reservation.rule,
        workload.prompt[row],
        workload.output[row],
        capacity.max_length,
    )
    order = contiguous.order_of(asked, size)
    start = contiguous.place_in_order(free, order, queued.is_seen)
    places = jnp.left_shift(size, order)
    return queued._replace(
        slots=queued.slots._replace(block=start[:, None], places=places[:, None]),
        is_seen=start >= 0,
    )


def observe(
    state: Simulation,
    queued: Queued,
    workload: Workload,
    capacity: Capacity,
    max_samples: int,
) -> interface.Counts:
    """What the policy may know, as `counts.counts` has it."""

    def attributes_of(request: Array) -> attributes.RequestAttributes:
        w, row = workload, jnp.maximum(request, 0)
        limit = jnp.broadcast_to(capacity.max_length, row.shape)
        if w.limit is not None:
            limit = w.limit[row]
        found = attributes.RequestAttributes()
        if w.attributes is not None:
            found = jax.tree.map(lambda column: column[row], w.attributes)
        return attributes.relative(found, w.arrival[row], limit, state.clock)

    slots, size = state.slots, capacity.page_size
    group, goal = batch.groups(slots, max_samples), batch.goal(slots)
    owned, theirs = batch.num_owned(slots, group, slots.places, size)
    moves, _ = batch.num_owned(slots, group, slots.length, size)
    none = jnp.zeros_like(slots.returned)
    q, alive = queued.slots, queued.slots.sequence >= 0
    common = jnp.zeros_like(queued.request)
    if q.sharing is not None:
        common = jnp.max(jnp.where(alive, q.sharing.common, 0), axis=1)
        common = jnp.where(queued.size > 1, common, 0)
    known = jnp.max(jnp.where(alive, q.known, 0), axis=1)
    needs = q.known if q.block is None else q.places
    fresh = demand.to_begin(needs, common, alive, page_size=size)
    back = demand.to_come_back(
        needs,
        common[:, None],
        queued.swapped_length,
        queued.pages_out,
        alive,
        page_size=size,
        num_pages=capacity.num_pages,
    )
    is_out = queued.pages_out > 0
    return interface.Counts(
        running=batch.is_running(slots),
        held=none if slots.held is None else slots.held,
        group=None if group is None else group.first,
        num_tokens=goal,
        length=slots.length,
        num_pages=demand.pages_for(slots.places, page_size=size),
        owned_pages=owned,
        owned_tokens=demand.own_tokens(slots.length, theirs, page_size=size),
        swap_pages=jnp.where(capacity.max_swap_pages > 0, moves, 0),
        copies=batch.num_copies(slots, group, goal - slots.length, size),
        preempted=slots.returned & batch.is_running(slots),
        scored_prompt=none,
        waiting=queued.is_seen,
        waiting_tokens=jnp.where(common > 0, common, known),
        waiting_cached=jnp.zeros_like(common),
        waiting_slots=queued.size,
        waiting_pages=jnp.where(is_out, back, fresh),
        waiting_preempted=jnp.any(alive & q.returned, axis=1),
        waiting_swapped=is_out,
        waiting_scored_prompt=jnp.zeros_like(is_out),
        free_pages=capacity.num_pages - jnp.sum(owned, dtype=jnp.int32),
        free_swap_pages=capacity.max_swap_pages - state.num_swapped,
        page_size=size,
        max_length=capacity.max_length,
        token_budget=capacity.token_budget,
        spare_logit_rows=0,
        attributes=attributes_of(slots.sequence // max_samples),
        waiting_attributes=attributes_of(queued.request),
    )
