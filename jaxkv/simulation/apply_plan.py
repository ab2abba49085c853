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
from jaxkv.scheduling import interface
from jaxkv.simulation import batch
from jaxkv.simulation.state import Capacity, Events, Progress, Queued, Simulation
from jaxkv.workloads import Workload


def retire(
    state: Simulation, max_samples: int
) -> tuple[Simulation, Int32[Array, " line"]]:
    """Empties the slots of those who ended, at once or when the whole batch is done.

    Returns:
      The new state, and the sequence at each place before.
    """
    kept = arrays.put(state.progress, state.left, state.left_with)
    line, whose = state.line, state.line.sequence
    alive = batch.is_running(line) & ~state.ended
    group, over = batch.groups(line, max_samples), state.ended
    if group is not None:
        over = group.is_first & group.any(state.ended) & ~group.any(alive)
    gone, held = state.ended, line.held
    if held is not None:
        finished, is_done = held | state.ended, ~jnp.any(alive)
        gone, held = finished & is_done, finished & ~is_done
    line = line._replace(
        sequence=jnp.where(gone, NOBODY, whose),
        places=jnp.where(gone, 0, line.places),
        held=held,
    )
    num_done = state.num_done + jnp.sum(over, dtype=jnp.int32)
    return state._replace(line=line, num_done=num_done, progress=kept), whose


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
    """What the plan asks for each place in line."""

    num_rows: Int32[Array, " line"]
    places: Int32[Array, " line"]
    drafts: Int32[Array, " line"] | None
    """Drafts fed behind these rows, beyond these places; None without speculation."""


class Done(NamedTuple):
    """What applying the plan came to."""

    num_admitted: Int32[Array, ""]
    """Requests that got slots."""
    num_moved: Int32[Array, ""]
    """Pages swapped out and in."""


def apply_plan(
    state: Simulation,
    plan: interface.Plan,
    queued: Queued,
    capacity: Capacity,
    max_samples: int,
    whose: Int32[Array, " line"],
) -> tuple[Simulation, Wish, Done]:
    """Preempts some and admits others, as the engine's `apply_plan` does.

    The machine is as `retire` leaves it, which says `whose` each place was before;
    `queued` is what the policy saw of the queue.
    """
    line, group = state.line, batch.groups(state.line, max_samples)
    out, pages, pages_out = _swap_out(state, plan, group, capacity)
    state = _note(state, plan.preempt, out, pages, whose)
    stays = (line.sequence >= 0) & ~plan.preempt
    owned, _ = batch.num_owned(line, group, line.places, capacity.page_size)
    used = jnp.sum(jnp.where(stays, owned, 0), dtype=jnp.int32)
    admit, pages_in = _admit(plan, queued, stays, capacity.num_pages - used)
    # One look at who stays, then at who comes, closes the ranks.
    leads = queued.is_reader & (queued.pages_out == 0)[:, None]
    asked = Wish(
        num_rows=jnp.where(leads, plan.head_rows[:, None], 0),
        places=jnp.where(leads, plan.head_places[:, None], 0),
        drafts=None if plan.drafts is None else jnp.zeros_like(leads, jnp.int32),
    )
    comes = admit[:, None] & (queued.line.sequence >= 0)
    both_sides = jnp.concatenate([stays, comes.ravel()])
    source = arrays.places(both_sides, stays.shape[0])
    there = source >= 0
    wish = Wish(plan.num_rows, plan.places, plan.drafts)
    both = (line, wish), (queued.line, asked)
    line, wish = _taken(*both, source)
    line = line._replace(sequence=jnp.where(there, line.sequence, NOBODY))
    head, losers = admit.shape[0], jnp.where(plan.preempt, whose // max_samples, NOBODY)
    if group is not None:
        losers = jnp.where(group.is_first, losers, NOBODY)
    rest = jnp.where(admit, NOBODY, queued.request)
    waiting = jnp.concatenate([losers, rest, state.queue[head:]])
    state = state._replace(
        line=line,
        queue=arrays.packed(waiting, state.queue.shape[0]),
        num_swapped=state.num_swapped + pages_out - pages_in,
    )
    num_admitted = jnp.sum(admit, dtype=jnp.int32)
    return state, wish, Done(num_admitted, pages_out + pages_in)


def _swap_out(
    state: Simulation,
    plan: interface.Plan,
    group: batch.Groups | None,
    capacity: Capacity,
) -> tuple[Bool[Array, " line"], Int32[Array, " line"], Int32[Array, ""]]:
    """Who is swapped out, with how many pages of each: all that shall be, or nobody."""
    line, leaves = state.line, plan.swap & plan.preempt
    written, _ = batch.num_owned(line, group, line.length, capacity.page_size)
    written = jnp.where(leaves, written, 0)
    num_pages = jnp.sum(written, dtype=jnp.int32)
    room = state.num_swapped + num_pages <= capacity.max_swap_pages
    out = leaves & room & (line.length > 0)
    return out, jnp.where(out, written, 0), jnp.where(room, num_pages, 0)


def _admit(
    plan: interface.Plan,
    queued: Queued,
    stays: Bool[Array, " line"],
    free_pages: Int32[Array, ""],
) -> tuple[Bool[Array, " head"], Int32[Array, ""]]:
    """Who comes in, and the pages that come back with those who were swapped out."""
    # Those swapped out come back all or none; and nobody without a slot.
    admit = plan.admit & queued.is_seen
    pages_in = jnp.sum(jnp.where(admit, queued.pages_out, 0), dtype=jnp.int32)
    fits = pages_in <= free_pages
    admit &= fits | (queued.pages_out == 0)
    num_free = stays.shape[0] - jnp.sum(stays, dtype=jnp.int32)
    num_slots = jnp.cumsum(jnp.where(admit, queued.size, 0), dtype=jnp.int32)
    return admit & (num_slots <= num_free), jnp.where(fits, pages_in, 0)


def _taken[T](old: T, new: T, source: Int32[Array, " line"]) -> T:
    """Takes entries of old and new ones side by side; zeros where the place is none."""
    fields, kind = jax.tree.flatten(old)
    both = zip(fields, jax.tree.leaves(new), strict=True)
    columns = [jnp.concatenate([x, y.ravel()]).astype(jnp.int32) for x, y in both]
    # Rows of a table: one gather, in place of one for each field.
    rows = jnp.where((source >= 0)[:, None], jnp.stack(columns, axis=1)[source], 0)
    taken = [rows[:, k].astype(x.dtype) for k, x in enumerate(fields)]
    return jax.tree.unflatten(kind, taken)


def _note(
    state: Simulation,
    gone: Bool[Array, " line"],
    out: Bool[Array, " line"],
    swapped_pages: Int32[Array, " line"],
    whose: Int32[Array, " line"],
) -> Simulation:
    """Notes who began or ended in the last step, and who is preempted in this one."""
    line, s = state.line, state.line.siblings
    leaves = gone | state.ended
    # What was lost is computed again up to where it left, but for what it was given.
    again = jnp.minimum(line.length, line.fed)
    given = jnp.zeros_like(again)
    if s is not None:
        given = jnp.where(s.forked, s.common, given)
    again = jnp.where(leaves, jnp.maximum(again - given, 0), 0)

    def if_(mask: Array, value: Array) -> Array:
        return jnp.where(mask, value, 0)

    ones = jnp.ones_like(again)
    events = Events(
        first_s=if_(state.began, state.clock[0] + 1),
        first_us=if_(state.began, state.clock[1]),
        finish_s=if_(state.ended, state.clock[0] + 1),
        finish_us=if_(state.ended, state.clock[1]),
        num_preempted=if_(gone, ones),
        num_recomputed=again,
    )
    index = jnp.where(state.began | leaves, whose, NOBODY)
    noted = arrays.put(state.events, index, jnp.stack(events, axis=1), "add")
    progress = Progress(
        known=line.known,
        fed=jnp.maximum(line.fed, line.length),
        returned=ones,
        swapped_length=if_(out, line.length),
        swapped_pages=swapped_pages,
        common=if_(out, given if s is None else s.common),
    )
    return state._replace(
        events=noted,
        left=jnp.where(gone, whose, NOBODY),
        left_with=jnp.stack(progress, axis=1),
    )
