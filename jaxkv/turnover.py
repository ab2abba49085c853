"""Who comes and who goes in a simulation: arrivals, admission, preemption, endings.

Here stands the state of a simulation, and what the policy is told of it. A sequence in
line is known by its place there; of one that left, `progress` keeps what it needs to
come back, and `events` what will be asked of it in the end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import clocks, contiguous, lines, paging, scheduling, tables
from jaxkv.contiguous import Reservation
from jaxkv.lines import Line, Siblings
from jaxkv.states import NOBODY
from jaxkv.workloads import Workload


class Capacity(NamedTuple):
    """The bounds of a machine, as those of `EngineConfig`, but free to be mapped."""

    num_pages: Int32[Array, ""]
    page_size: Int32[Array, ""]
    max_length: Int32[Array, ""]
    token_budget: Int32[Array, ""]
    max_swap_pages: Int32[Array, ""]


class Progress(NamedTuple):
    """How far a sequence had come when it gave way; zeros before."""

    known: Int32[Array, "*n"]
    """Tokens known: prompt and answer so far."""
    fed: Int32[Array, "*n"]
    """Tokens whose K and V were written at some time."""
    returned: Int32[Array, "*n"]
    """1."""
    swapped_length: Int32[Array, "*n"]
    """Tokens whose K and V are swapped out."""
    swapped_pages: Int32[Array, "*n"]
    """Pages that hold them, those of several sequences counted with one."""
    common: Int32[Array, "*n"]
    """Tokens whose pages it shared, if it is swapped out."""


class Events(NamedTuple):
    """What became of a sequence."""

    first_s: Int32[Array, "*n"]
    """When its first token was drawn: seconds + 1, or 0 before."""
    first_us: Int32[Array, "*n"]
    """And microseconds."""
    finish_s: Int32[Array, "*n"]
    """When it ended: seconds + 1, or 0 before."""
    finish_us: Int32[Array, "*n"]
    num_preempted: Int32[Array, "*n"]
    """Times that it gave way."""
    num_swapped: Int32[Array, "*n"]
    """How many of these kept its pages."""
    num_recomputed: Int32[Array, "*n"]
    """Tokens whose K and V were lost and computed again."""


class Simulation(NamedTuple):
    """All that a step changes."""

    clock: Int32[Array, " 2"]
    line: Line
    began: Bool[Array, " line"]
    """Who drew its first token in the last step."""
    ended: Bool[Array, " line"]
    """Who drew its last. Both are noted in the next step, whose clock says when."""
    left: Int32[Array, " line"]
    """Sequences that gave way in the last step, or NOBODY."""
    left_with: Int32[Array, "line fields"]
    """Their progress. It is written in the next step, before anything is read: after
    that, XLA would copy all of it in every step."""
    queue: Int32[Array, " waiting"]
    """Requests that wait, the preempted ones first; NOBODY beyond."""
    num_taken: Int32[Array, ""]
    """Requests that have entered the queue."""
    num_swapped: Int32[Array, ""]
    """Pages that are swapped out."""
    num_done: Int32[Array, ""]
    """Requests of which every sequence has ended."""
    progress: Int32[Array, "sequences fields"]
    """A row of `Progress` for each."""
    events: Int32[Array, "sequences fields"]
    """A row of `Events` for each."""
    order: Int32[Array, " requests"]
    """Requests that can be served, in order of arrival; then the rejected ones."""
    num_served: Int32[Array, ""]
    """How many can."""


class Queued(NamedTuple):
    """Sequences of the requests at the head of the queue, as they would stand in line.

    All but `request` and `pages_out` of shape [head, samples].
    """

    request: Int32[Array, " head"]
    line: Line
    """NOBODY where a sequence has ended, or is none."""
    is_reader: Bool[Array, "head samples"]
    """Who feeds first for the request."""
    pages_out: Int32[Array, " head"]
    """Pages that are swapped out."""
    swapped_length: Int32[Array, "head samples"]
    is_seen: Bool[Array, " head"]
    """Requests that the policy sees."""

    @property
    def size(self) -> Int32[Array, " head"]:
        """Sequences of each request that have not ended."""
        return jnp.sum(self.line.sequence >= 0, axis=1, dtype=jnp.int32)


def retire(
    state: Simulation, max_samples: int
) -> tuple[Simulation, Int32[Array, " line"]]:
    """Empties the slots of those who ended, at once or when the whole batch is done.

    Returns:
      The new state, and the sequence at each place before.
    """
    kept = paging.put(state.progress, state.left, state.left_with, "set")
    line, whose = state.line, state.line.sequence
    alive = lines.is_running(line) & ~state.ended
    group, over = lines.groups(line, max_samples), state.ended
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
    comes &= clocks.is_past(workload.arrival[request], state.clock)
    queue = jnp.where(comes, request, state.queue[:head])
    return state._replace(
        queue=jnp.concatenate([queue, state.queue[head:]]),
        num_taken=state.num_taken + jnp.sum(comes, dtype=jnp.int32),
    )


def look(state: Simulation, workload: Workload, head: int, max_samples: int) -> Queued:
    """Looks up who waits at the head of the queue."""
    request = state.queue[:head]
    row = jnp.maximum(request, 0)
    sample = jnp.arange(max_samples, dtype=jnp.int32)
    sequence = row[:, None] * max_samples + sample[None, :]
    was = Progress(*jnp.moveaxis(state.progress[sequence], -1, 0))
    prompt = workload.prompt[row][:, None]
    alive = jnp.broadcast_to((request >= 0)[:, None], sequence.shape)
    is_reader, siblings = alive, None
    if max_samples > 1:
        finish = state.events[sequence, Events._fields.index("finish_s")]
        alive &= (finish == 0) & (sample[None, :] < workload.samples[row][:, None])
        before = jnp.cumsum(alive, axis=1, dtype=jnp.int32)
        is_reader = alive & (before == 1)
        # Who has pages was forked before; the others wait for the first, which reads.
        waits = alive & ~is_reader & (was.swapped_length == 0)
        reads = is_reader & jnp.any(waits, axis=1, keepdims=True)
        several = before[:, -1:] > 1
        siblings = Siblings(
            common=jnp.where(
                waits | reads | (several & (was.swapped_length == 0)),
                jnp.broadcast_to(prompt, sequence.shape),
                was.common,
            ),
            reads=reads,
            waits=waits,
            forked=was.swapped_length > 0,
        )
    holds = state.line.held is not None
    line = Line(
        sequence=jnp.where(alive, sequence, NOBODY),
        length=was.swapped_length,
        places=was.swapped_length,
        known=jnp.maximum(prompt, was.known),
        # Nothing of what was swapped out is lost.
        fed=jnp.where(was.swapped_length > 0, 0, was.fed),
        returned=was.returned > 0,
        held=jnp.zeros_like(alive) if holds else None,
        siblings=siblings,
        block=None,
    )
    pages_out = jnp.where(alive, was.swapped_pages, 0)
    return Queued(
        request=request,
        line=line,
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
    line, size = state.line, capacity.page_size
    assert line.block is not None
    blocks = jnp.where(line.sequence >= 0, line.block, NOBODY)
    leaves = tables.pages_for(line.places, page_size=size)
    free = contiguous.free_leaves(reservation.idle, blocks, leaves)
    row = jnp.maximum(queued.request, 0)
    asked = contiguous.asked(
        *(reservation.rule, workload.prompt[row], workload.output[row]),
        capacity.max_length,
    )
    order = contiguous.order_of(asked, size)
    start = contiguous.place_in_order(free, order, queued.is_seen)
    places = jnp.left_shift(size, order)
    return queued._replace(
        line=queued.line._replace(block=start[:, None], places=places[:, None]),
        is_seen=start >= 0,
    )


def observe(
    state: Simulation, queued: Queued, capacity: Capacity, max_samples: int
) -> scheduling.Counts:
    """What the policy may know, as `admission.counts` has it."""
    line, size = state.line, capacity.page_size
    group = lines.groups(line, max_samples)
    owned, theirs = lines.num_owned(line, group, line.places, size)
    moves, _ = lines.num_owned(line, group, line.length, size)
    goal = lines.goal(line)
    q, alive = queued.line, queued.line.sequence >= 0
    common = jnp.zeros_like(queued.request)
    if q.siblings is not None:
        common = jnp.max(jnp.where(alive, q.siblings.common, 0), axis=1)
        common = jnp.where(queued.size > 1, common, 0)
    known = jnp.max(jnp.where(alive, q.known, 0), axis=1)
    full = common // size
    needs = q.known if q.block is None else q.places
    pages = tables.pages_for(needs, page_size=size)
    fresh = jnp.where(alive, pages - full[:, None], 0)
    # Who is swapped out takes its pages, those by which it grows, and copies.
    have = tables.pages_for(queued.swapped_length, page_size=size)
    have = jnp.where(queued.swapped_length > 0, have, full[:, None])
    growth = jnp.where(alive, jnp.maximum(pages - have, 0), 0)
    partial = alive & (queued.swapped_length % size > 0)
    copies = jnp.maximum(jnp.sum(partial, axis=1, dtype=jnp.int32) - 1, 0)
    wanted = queued.pages_out + jnp.sum(growth, axis=1, dtype=jnp.int32) + copies
    is_out, none = queued.pages_out > 0, jnp.zeros_like(line.returned)
    return scheduling.Counts(
        running=lines.is_running(line),
        held=none if line.held is None else line.held,
        group=None if group is None else group.first,
        num_tokens=goal,
        length=line.length,
        num_pages=tables.pages_for(line.places, page_size=size),
        owned_pages=owned,
        owned_tokens=jnp.maximum(line.length - theirs * size, 0),
        swap_pages=jnp.where(capacity.max_swap_pages > 0, moves, 0),
        copies=lines.num_copies(line, group, goal - line.length, size),
        preempted=line.returned & lines.is_running(line),
        scored_prompt=none,
        waiting=queued.is_seen,
        waiting_tokens=jnp.where(common > 0, common, known),
        waiting_cached=jnp.zeros_like(common),
        waiting_slots=queued.size,
        waiting_pages=jnp.where(
            is_out,
            jnp.minimum(wanted, capacity.num_pages),
            full + jnp.sum(fresh, axis=1, dtype=jnp.int32),
        ),
        waiting_preempted=jnp.any(alive & q.returned, axis=1),
        waiting_swapped=is_out,
        waiting_scored_prompt=jnp.zeros_like(is_out),
        free_pages=capacity.num_pages - jnp.sum(owned, dtype=jnp.int32),
        free_swap_pages=capacity.max_swap_pages - state.num_swapped,
        page_size=size,
        max_length=capacity.max_length,
        token_budget=capacity.token_budget,
        spare_logit_rows=0,
    )


class Wish(NamedTuple):
    """What the plan asks for each place in line."""

    num_rows: Int32[Array, " line"]
    places: Int32[Array, " line"]


class Done(NamedTuple):
    """What carrying out the plan came to."""

    num_admitted: Int32[Array, ""]
    """Requests that got slots."""
    num_moved: Int32[Array, ""]
    """Pages swapped out and in."""


def carry_out(
    state: Simulation,
    plan: scheduling.Plan,
    queued: Queued,
    capacity: Capacity,
    max_samples: int,
    whose: Int32[Array, " line"],
) -> tuple[Simulation, Wish, Done]:
    """Lets some give way and others in, as `admission.carry_out` does.

    Args:
      state: the machine, after `retire`.
      plan: what the policy decided.
      queued: what it saw of the queue.
      capacity: bounds.
      max_samples: static.
      whose: the sequence at each place before `retire`.
    """
    line, size = state.line, capacity.page_size
    group = lines.groups(line, max_samples)
    written, _ = lines.num_owned(line, group, line.length, size)
    written = jnp.where(plan.swap & plan.preempt, written, 0)
    pages_out = jnp.sum(written, dtype=jnp.int32)
    room = state.num_swapped + pages_out <= capacity.max_swap_pages
    out = plan.swap & plan.preempt & room & (line.length > 0)
    pages_out = jnp.where(room, pages_out, 0)
    state = _note(state, plan.preempt, out, jnp.where(out, written, 0), whose)
    stays = (line.sequence >= 0) & ~plan.preempt
    owned, _ = lines.num_owned(line, group, line.places, size)
    used = jnp.sum(jnp.where(stays, owned, 0), dtype=jnp.int32)
    # Those swapped out come back all or none; and nobody without a slot.
    admit, is_out = plan.admit & queued.is_seen, queued.pages_out > 0
    pages_in = jnp.sum(jnp.where(admit, queued.pages_out, 0), dtype=jnp.int32)
    fits = used + pages_in <= capacity.num_pages
    pages_in = jnp.where(fits, pages_in, 0)
    admit &= fits | ~is_out
    num_free = stays.shape[0] - jnp.sum(stays, dtype=jnp.int32)
    num_slots = jnp.cumsum(jnp.where(admit, queued.size, 0), dtype=jnp.int32)
    admit &= num_slots <= num_free
    # One look at who stays, then at who comes, closes the ranks.
    leads = queued.is_reader & ~is_out[:, None]
    asked = Wish(
        num_rows=jnp.where(leads, plan.head_rows[:, None], 0),
        places=jnp.where(leads, plan.head_places[:, None], 0),
    )
    comes = admit[:, None] & (queued.line.sequence >= 0)
    source = _ranks(jnp.concatenate([stays, comes.ravel()]), stays.shape[0])
    there = source >= 0
    both = (line, Wish(plan.num_rows, plan.places)), (queued.line, asked)
    line, wish = _taken(*both, source)
    line = line._replace(sequence=jnp.where(there, line.sequence, NOBODY))
    head, losers = admit.shape[0], jnp.where(plan.preempt, whose // max_samples, NOBODY)
    if group is not None:
        losers = jnp.where(group.is_first, losers, NOBODY)
    rest = jnp.where(admit, NOBODY, queued.request)
    waiting = jnp.concatenate([losers, rest, state.queue[head:]])
    source = _ranks(waiting >= 0, state.queue.shape[0])
    state = state._replace(
        line=line,
        queue=jnp.where(source >= 0, waiting[source], NOBODY),
        num_swapped=state.num_swapped + pages_out - pages_in,
    )
    num_admitted = jnp.sum(admit, dtype=jnp.int32)
    return state, wish, Done(num_admitted, pages_out + pages_in)


def _taken[T](old: T, new: T, source: Int32[Array, " line"]) -> T:
    """Takes entries of old and new ones side by side; zeros where the place is none."""
    fields, kind = jax.tree.flatten(old)
    both = zip(fields, jax.tree.leaves(new), strict=True)
    columns = [jnp.concatenate([x, y.ravel()]).astype(jnp.int32) for x, y in both]
    # Rows of a table: one gather, in place of one for each field.
    rows = jnp.where((source >= 0)[:, None], jnp.stack(columns, axis=1)[source], 0)
    taken = [rows[:, k].astype(x.dtype) for k, x in enumerate(fields)]
    return jax.tree.unflatten(kind, taken)


def _ranks(mask: Bool[Array, " n"], num: int) -> Int32[Array, " num"]:
    """The places of the marked entries, in order; NOBODY behind them."""
    place = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, NOBODY)
    every = jnp.arange(mask.shape[0], dtype=jnp.int32)
    return paging.put(jnp.full((num,), NOBODY, jnp.int32), place, every, "set")


def _note(
    state: Simulation,
    gone: Bool[Array, " line"],
    out: Bool[Array, " line"],
    swapped_pages: Int32[Array, " line"],
    whose: Int32[Array, " line"],
) -> Simulation:
    """Notes who began or ended in the last step, and who gives way in this one."""
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
        num_swapped=if_(out, ones),
        num_recomputed=again,
    )
    index = jnp.where(state.began | leaves, whose, NOBODY)
    noted = paging.put(state.events, index, jnp.stack(events, axis=1), "add")
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
