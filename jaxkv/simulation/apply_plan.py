"""Who comes and who goes in a simulation: arrivals, admission, preemption, endings.

They are carried out as `apply_plan` does in the engine, on counts alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.clock import is_past
from jaxkv.engine import NOBODY
from jaxkv.memory import demand
from jaxkv.scheduling import interface
from jaxkv.simulation import batch
from jaxkv.simulation.batch import Slots
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.state import Capacity, Events, Progress, Queued, Simulation
from jaxkv.workloads import Workload


def retire(
    state: Simulation, max_samples: int
) -> tuple[Simulation, Int32[Array, " slots"]]:
    """Empties the slots of those who ended, at once or when the whole batch is done.

    Returns:
      The new state, and the sequence at each place before.
    """
    kept = arrays.put(state.progress, state.left, state.left_with)
    slots, whose = state.slots, state.slots.sequence
    alive = batch.is_running(slots) & ~state.ended
    group, over = batch.groups(slots, max_samples), state.ended
    if group is not None:
        over = group.is_first & group.any(state.ended) & ~group.any(alive)
    gone, held = state.ended, slots.held
    if held is not None:
        finished, is_done = held | state.ended, ~jnp.any(alive)
        gone, held = finished & is_done, finished & ~is_done
    slots = slots._replace(
        sequence=jnp.where(gone, NOBODY, whose),
        places=jnp.where(gone, 0, slots.places),
        held=held,
    )
    num_done = state.num_done + jnp.sum(over, dtype=jnp.int32)
    return state._replace(slots=slots, num_done=num_done, progress=kept), whose


def arrive(state: Simulation, workload: Workload, head: int) -> Simulation:
    """Fills the head of the queue with those who have arrived."""
    size = jnp.sum(state.queue >= 0, dtype=jnp.int32)
    place = jnp.arange(head, dtype=jnp.int32)
    index = state.num_taken + place - size
    request = state.order[jnp.clip(index, 0, state.order.size - 1)]
    comes = (place >= size) & (index < state.num_served)
    comes &= index < state.num_done + workload.clients
    comes &= is_past(workload.arrival[request], state.clock)
    queue = jnp.where(comes, request, state.queue[:head])
    return state._replace(
        queue=jnp.concatenate([queue, state.queue[head:]]),
        num_taken=state.num_taken + jnp.sum(comes, dtype=jnp.int32),
    )


def num_arrived(
    state: Simulation, workload: Workload, clock: Int32[Array, "*steps 2"]
) -> Int32[Array, "*steps"]:
    """Counts the requests that can be served and have come by each time."""
    come = jnp.zeros(clock.shape[:-1], jnp.int32)
    # Arrivals are in order: a binary search for the last that is past.
    for bit in reversed(range(state.order.size.bit_length())):
        more = come + (1 << bit)
        last = state.order[jnp.minimum(more, state.order.size) - 1]
        past = is_past(workload.arrival[last], clock)
        come = jnp.where((more <= state.num_served) & past, more, come)
    return come


class Wish(NamedTuple):
    """What the plan asks for each slot."""

    num_rows: Int32[Array, " slots"]
    places: Int32[Array, " slots"]
    drafts: Int32[Array, " slots"] | None
    """Drafts fed behind these rows, beyond these places; None without speculation."""


def apply_plan(
    state: Simulation,
    plan: interface.Plan,
    queued: Queued,
    capacity: Capacity,
    max_samples: int,
    whose: Int32[Array, " slots"],
) -> tuple[Simulation, Wish, Int32[Array, ""], Int32[Array, ""]]:
    """Preempts some and admits others, as the engine's `apply_plan` does.

    The state is as `retire` leaves it, which says `whose` each slot was before;
    `queued` is what the policy saw of the queue.

    Returns:
      The state, the plan for each slot, the number of requests that got slots, and the
      number of pages swapped out and in.
    """
    slots, group = state.slots, batch.groups(state.slots, max_samples)
    # All pages that the plan swaps out find room in the buffer, or none is moved.
    leaves = plan.swap & plan.preempt
    written, _ = batch.num_owned(slots, group, slots.length, capacity.page_size)
    written = jnp.where(leaves, written, 0)
    pages_out = jnp.sum(written, dtype=jnp.int32)
    room = state.num_swapped + pages_out <= capacity.max_swap_pages
    pages_out = jnp.where(room, pages_out, 0)
    out = leaves & room & (slots.length > 0)
    state = _note(state, plan.preempt, out, jnp.where(out, written, 0), whose)
    stays = (slots.sequence >= 0) & ~plan.preempt
    owned, _ = batch.num_owned(slots, group, slots.places, capacity.page_size)
    used = jnp.sum(jnp.where(stays, owned, 0), dtype=jnp.int32)
    # Those swapped out come back all or none; and none without a slot.
    admit = plan.admit & queued.is_seen
    pages_in = jnp.sum(jnp.where(admit, queued.pages_out, 0), dtype=jnp.int32)
    fits = pages_in <= capacity.num_pages - used
    pages_in = jnp.where(fits, pages_in, 0)
    admit &= fits | (queued.pages_out == 0)
    num_free = stays.shape[0] - jnp.sum(stays, dtype=jnp.int32)
    num_slots = jnp.cumsum(jnp.where(admit, queued.size, 0), dtype=jnp.int32)
    admit &= num_slots <= num_free
    # Slots of those who stay, then of those who come, and what each is to get.
    leads = queued.is_reader & (queued.pages_out == 0)[:, None]
    asked = Wish(
        num_rows=jnp.where(leads, plan.head_rows[:, None], 0),
        places=jnp.where(leads, plan.head_places[:, None], 0),
        drafts=None if plan.drafts is None else jnp.zeros_like(leads, jnp.int32),
    )
    comes = admit[:, None] & (queued.slots.sequence >= 0)
    source = arrays.places(jnp.concatenate([stays, comes.ravel()]), stays.shape[0])
    old = slots, Wish(plan.num_rows, plan.places, plan.drafts)
    fields, kind = jax.tree.flatten(old)
    both = zip(fields, jax.tree.leaves((queued.slots, asked)), strict=True)
    columns = [jnp.concatenate([x, y.ravel()]).astype(jnp.int32) for x, y in both]
    # Rows of a table: one gather, in place of one for each field.
    rows = jnp.where((source >= 0)[:, None], jnp.stack(columns, axis=1)[source], 0)
    taken = [rows[:, k].astype(x.dtype) for k, x in enumerate(fields)]
    slots, wish = jax.tree.unflatten(kind, taken)
    sequence = jnp.where(source >= 0, slots.sequence, NOBODY)
    losers = jnp.where(plan.preempt, whose // max_samples, NOBODY)
    if group is not None:
        losers = jnp.where(group.is_first, losers, NOBODY)
    rest = jnp.where(admit, NOBODY, queued.request)
    waiting = jnp.concatenate([losers, rest, state.queue[admit.shape[0] :]])
    state = state._replace(
        slots=slots._replace(sequence=sequence),
        queue=arrays.packed(waiting, state.queue.shape[0]),
        num_swapped=state.num_swapped + pages_out - pages_in,
    )
    return state, wish, jnp.sum(admit, dtype=jnp.int32), pages_out + pages_in


def _note(
    state: Simulation,
    gone: Bool[Array, " slots"],
    out: Bool[Array, " slots"],
    swapped_pages: Int32[Array, " slots"],
    whose: Int32[Array, " slots"],
) -> Simulation:
    """Notes who began or ended in the last step, and who is preempted in this one."""
    slots, s = state.slots, state.slots.sharing
    leaves = gone | state.ended
    # What was lost is computed again up to where it left, but for what it was given.
    again = jnp.minimum(slots.length, slots.fed)
    given = jnp.zeros_like(again)
    if s is not None:
        given = jnp.where(s.forked, s.common, given)
    again = jnp.where(leaves, jnp.maximum(again - given, 0), 0)
    index = jnp.where(state.began | leaves, whose, NOBODY)

    def if_(mask: Array, value: Array) -> Array:
        return jnp.where(mask, value, 0)

    events = Events(
        first_s=if_(state.began, state.clock[0] + 1),
        first_us=if_(state.began, state.clock[1]),
        finish_s=if_(state.ended, state.clock[0] + 1),
        finish_us=if_(state.ended, state.clock[1]),
        num_preempted=gone.astype(jnp.int32),
        num_recomputed=again,
    )
    progress = Progress(
        known=slots.known,
        fed=jnp.maximum(slots.fed, slots.length),
        returned=jnp.ones_like(again),
        swapped_length=jnp.where(out, slots.length, 0),
        swapped_pages=swapped_pages,
        common=jnp.where(out, given if s is None else s.common, 0),
    )
    return state._replace(
        events=arrays.put(state.events, index, jnp.stack(events, axis=1), "add"),
        left=jnp.where(gone, whose, NOBODY),
        left_with=jnp.stack(progress, axis=1),
    )


class Granted(NamedTuple):
    """What a step gets of what its plan asks for: everything or nothing."""

    num_rows: Int32[Array, " slots"]
    """Rows of each place, drafts apart."""
    num_drafts: Int32[Array, " slots"] | None
    kept: Int32[Array, " slots"]
    """Token places that each holds, those for drafts apart."""
    num_copied: Int32[Array, ""]
    used_pages: Int32[Array, ""]
    enough: Bool[Array, ""]


def grant(
    slots: Slots,
    group: batch.Groups | None,
    wish: Wish,
    capacity: Capacity,
    reservation: Reservation | None,
) -> tuple[Slots, Granted]:
    """Grants pages to all or to nobody, as `page_table.reserve` does."""
    size = capacity.page_size
    copies = batch.num_copies(slots, group, wish.num_rows, size)
    places = kept = slots.places  # with a reservation, all that is ever needed
    if reservation is None:
        wanted = jnp.where(batch.is_running(slots), wish.places, 0)
        places = kept = jnp.maximum(slots.places, wanted)
        if wish.drafts is not None:
            places = jnp.maximum(slots.places, wanted + wish.drafts)
    growth = demand.growth(slots.places, places, page_size=size)
    owned, _ = batch.num_owned(slots, group, slots.places, size)
    held = jnp.sum(owned, dtype=jnp.int32)
    used = held + jnp.sum(growth + copies, dtype=jnp.int32)
    enough = used <= capacity.num_pages
    return slots._replace(places=jnp.where(enough, places, slots.places)), Granted(
        num_rows=jnp.where(enough, wish.num_rows, 0),
        num_drafts=None if wish.drafts is None else jnp.where(enough, wish.drafts, 0),
        kept=kept,
        num_copied=jnp.where(enough, jnp.sum(copies, dtype=jnp.int32), 0),
        used_pages=jnp.where(enough, used, held),
        enough=enough,
    )


def release_drafts(slots: Slots, granted: Granted) -> Slots:
    """Releases what was reserved for drafts that were turned down."""
    if granted.num_drafts is None:
        return slots
    places = jnp.maximum(granted.kept, slots.length)
    places = jnp.where(granted.num_drafts > 0, places, slots.places)
    return slots._replace(places=places)
