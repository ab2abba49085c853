"""Arrivals, the `Counts` for the policy, and application of its plan."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import ledger
from jaxkv.clock import is_past
from jaxkv.ledger import (
    NO_SEQUENCE,
    Groups,
    Head,
    PageFacts,
    RequestColumns,
    SlotPlan,
    Slots,
)
from jaxkv.memory import feeding_end, missing_pages, own_tokens, pages_for
from jaxkv.scheduling import Counts, Plan, RequestAttributes
from jaxkv.simulation import contiguous, counted_pages
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.counted_pages import CountedPages
from jaxkv.simulation.state import Capacity, Simulation
from jaxkv.workloads import Workload


def enqueue_arrivals(state: Simulation, workload: Workload, head: int) -> Simulation:
    """Moves requests that have arrived into the head of the queue."""
    books = state.ledger
    place = jnp.arange(head, dtype=jnp.int32)
    index = state.num_taken + place - books.num_waiting
    request = state.order[jnp.clip(index, 0, state.order.size - 1)]
    comes = (place >= books.num_waiting) & (index < state.num_served)
    comes &= index < state.num_done + workload.clients
    comes &= is_past(workload.arrival[request], books.clock)
    queue = jnp.where(comes, request, books.queue[:head])
    num = jnp.sum(comes, dtype=jnp.int32)
    return state._replace(
        ledger=books._replace(
            queue=jnp.concatenate([queue, books.queue[head:]]),
            num_waiting=books.num_waiting + num,
        ),
        num_taken=state.num_taken + num,
    )


def num_arrived(
    state: Simulation, workload: Workload, clock: Int32[Array, "*steps 2"]
) -> Int32[Array, "*steps"]:
    """Counts the servable requests with given times that have arrived by each time."""
    num = state.num_served if state.sessions is None else state.sessions.num_roots
    come = jnp.zeros(clock.shape[:-1], jnp.int32)
    # Binary search for the last arrival, since arrivals are in order.
    for bit in reversed(range(state.order.size.bit_length())):
        more = come + (1 << bit)
        last = state.order[jnp.minimum(more, state.order.size) - 1]
        past = is_past(workload.arrival[last], clock)
        come = jnp.where((more <= num) & past, more, come)
    return come


def groups_by_request(slots: Slots, request: Int32[Array, " slots"]) -> Groups | None:
    """Finds the groups of the slots; None if every request has one sequence."""
    return None if slots.fork is None else ledger.find_groups(request)


class Observation(NamedTuple):
    """The running batch and the head of the queue, before a plan."""

    request: Int32[Array, " slots"]
    """Request of each slot; negative in an empty slot."""
    group: Groups | None
    """Groups of the slots; None if every request has one sequence."""
    head: Head
    head_pages: CountedPages
    """Pages that the sequences of the head get at their admission."""
    counts: Counts


def observe_simulation(
    state: Simulation,
    workload: Workload,
    capacity: Capacity,
    reservation: Reservation | None,
    *,
    max_samples: int,
    head: int,
) -> Observation:
    """Observes the batch and the queue, as the engine's `observe_engine`.

    With a reservation, a request can be admitted only if there is a free block for it.
    """
    w = workload
    books = state.ledger
    size = capacity.page_size
    slots = books.slots
    length, places, block, evicted = state.pages
    running_request = slots.sequence // max_samples
    group = groups_by_request(slots, running_request)
    request = books.queue[:head]
    sample = jnp.arange(max_samples, dtype=jnp.int32)[None, :]
    exists = (request >= 0)[:, None]
    if max_samples > 1:
        exists &= sample < w.samples[jnp.maximum(request, 0)][:, None]
    sequence = request[:, None] * max_samples + sample
    waiting = ledger.look_up_head(
        books, request, jnp.where(exists, sequence, NO_SEQUENCE)
    )
    owned, num_shared = counted_pages.num_owned(slots, length, group, places, size)
    moves, _ = counted_pages.num_owned(slots, length, group, length, size)
    rows = ledger.num_to_feed(slots) - length

    if state.prefixes is not None:
        num_shared = length // size  # full pages of running requests are cached
    limit = w.limit
    if limit is None:
        limit = jnp.broadcast_to(capacity.max_length, w.prompt.shape)
    arrival = w.arrival if state.sessions is None else state.sessions.arrival
    attributes = RequestAttributes() if w.attributes is None else w.attributes
    counts = ledger.observe(
        books,
        waiting,
        running_request,
        RequestColumns(arrival, limit, attributes),
        PageFacts(
            length=length,
            num_pages=pages_for(places, page_size=size),
            owned_pages=owned,
            owned_tokens=own_tokens(length, num_shared, page_size=size),
            swap_pages=jnp.where(capacity.max_swap_pages > 0, moves, 0),
            copies=counted_pages.num_copies(slots, length, group, rows, size),
            group=None if group is None else group.first,
            free_pages=capacity.num_pages - jnp.sum(owned, dtype=jnp.int32),
            free_swap_pages=capacity.max_swap_pages - state.num_swapped,
        ),
        num_pages=capacity.num_pages,
        page_size=size,
        max_length=capacity.max_length,
        token_budget=capacity.token_budget,
    )
    pages = CountedPages(waiting.swapped_tokens, waiting.swapped_tokens, None)
    if evicted is not None:
        assert capacity.evict_limit is not None
        prompt = w.prompt[jnp.maximum(running_request, 0)]
        end = feeding_end(state.pages.position, prompt, capacity.evict_limit)
        goal = jnp.maximum(counts.target_length - evicted, 0)
        num = jnp.minimum(counts.waiting_tokens, w.prompt[jnp.maximum(request, 0)])
        counts = counts._replace(
            target_length=jnp.minimum(goal, end), waiting_tokens=num
        )
        pages = pages._replace(evicted=jnp.zeros_like(pages.length))
    if (cache := state.prefixes) is not None:
        cached = counted_pages.match_chains(
            cache, w, request, waiting.num_to_feed, slots, size
        )
        pages = CountedPages(cached[:, None], cached[:, None], None)
        num_fed = jnp.maximum(waiting.slots.num_fed - cached[:, None], 0)
        waiting = waiting._replace(slots=waiting.slots._replace(num_fed=num_fed))
        counts = counts._replace(
            waiting_cached=cached, shared_pages=jnp.zeros((), jnp.int32)
        )
    if reservation is not None:
        assert block is not None
        blocks = jnp.where(slots.sequence >= 0, block, NO_SEQUENCE)
        leaves = pages_for(places, page_size=size)
        free = contiguous.free_leaves(reservation.idle, blocks, leaves)
        row = jnp.maximum(request, 0)
        num_reserved = contiguous.reserved_places(
            reservation.rule, w.prompt[row], w.output[row], capacity.max_length
        )
        order = contiguous.block_order(num_reserved, size)
        start = contiguous.find_blocks(free, order, request >= 0)
        block_size = jnp.left_shift(size, order)
        pages = CountedPages(
            waiting.swapped_tokens, block_size[:, None], start[:, None]
        )
        counts = counts._replace(
            waiting=start >= 0,
            waiting_pages=jnp.where(
                waiting.num_slots > 0, pages_for(block_size, page_size=size), 0
            ),
        )
    return Observation(running_request, group, waiting, pages, counts)


class AdmittedBatch(NamedTuple):
    """The plan after preemption and admission."""

    plan: SlotPlan
    num_preempted: Int32[Array, ""]
    """Sequences preempted."""
    num_admitted: Int32[Array, ""]
    """Requests admitted."""
    num_swapped: Int32[Array, ""]
    """Pages swapped out and in."""
    admitted: Bool[Array, " head"]
    """Requests admitted."""


def preempt_and_admit(
    state: Simulation,
    plan: Plan,
    observation: Observation,
    prompt: Int32[Array, " requests"],
    capacity: Capacity,
) -> tuple[Simulation, AdmittedBatch]:
    """Preempts and admits, as the engine's `apply_plan`.

    Args:
      state: the simulation.
      plan: the plan, which preempts whole requests.
      observation: the batch and the queue of the plan.
      prompt: tokens of each request's prompt.
      capacity: bounds.

    Returns:
      The new state, and the plan by its new slots.
    """
    slots = state.ledger.slots
    length = state.pages.length
    request, group, head, head_pages, counts = observation
    # All pages that the plan swaps out fit into the buffer, or none is moved.
    leaves = plan.swap
    written, _ = counted_pages.num_owned(
        slots, length, group, length, capacity.page_size
    )
    pages_out = jnp.sum(jnp.where(leaves, written, 0), dtype=jnp.int32)
    room = state.num_swapped + pages_out <= capacity.max_swap_pages
    pages_out = jnp.where(room, pages_out, 0)
    is_swapped = leaves & room & (length > 0)
    # Sequences that are recomputed have the prompt in common.
    num_common = jnp.zeros_like(length)
    if slots.fork is not None:
        own_prompt = prompt[jnp.maximum(request, 0)]
        num_common = jnp.where(is_swapped, slots.fork.num_common, own_prompt)
    stays = ledger.is_occupied(slots) & ~plan.preempt
    used = jnp.sum(jnp.where(stays, counts.owned_pages, 0), dtype=jnp.int32)
    books, preempted = ledger.preempt(
        state.ledger,
        plan.preempt,
        request,
        group,
        length=state.pages.position,
        num_common=num_common,
        swapped_pages=written,
        is_swapped=is_swapped,
    )
    books, new = ledger.admit(
        books,
        head,
        plan,
        preempted,
        ready=counts.waiting,
        free_pages=capacity.num_pages - used,
        carried=(state.pages, head_pages),
    )
    state = state._replace(
        ledger=books,
        pages=new.carried,
        num_swapped=state.num_swapped + pages_out - new.pages_in,
    )
    return state, AdmittedBatch(
        new.plan,
        num_preempted=jnp.sum(plan.preempt, dtype=jnp.int32),
        num_admitted=jnp.sum(new.admitted, dtype=jnp.int32),
        num_swapped=pages_out + new.pages_in,
        admitted=new.admitted,
    )


class GrantedPlan(NamedTuple):
    """The granted part of a plan: all of it or none."""

    num_rows: Int32[Array, " slots"]
    """Rows of each slot, drafts excluded."""
    num_drafts: Int32[Array, " slots"] | None
    num_places: Int32[Array, " slots"]
    """Token places reserved for each slot, those of drafts excluded."""
    num_copied: Int32[Array, ""]
    used_pages: Int32[Array, ""]
    enough: Bool[Array, ""]
    """True if the plan was granted."""
    used_window_pages: Int32[Array, ""] | None = None
    """As in `SimulatedStep`."""


def grant(
    slots: Slots,
    pages: CountedPages,
    group: Groups | None,
    wish: SlotPlan,
    capacity: Capacity,
) -> tuple[CountedPages, GrantedPlan]:
    """Grants the pages of the whole plan or none, as `page_table.reserve`."""
    size = capacity.page_size
    copies = counted_pages.num_copies(slots, pages.length, group, wish.num_rows, size)
    places = num_places = pages.places  # a contiguous reservation is made at admission
    if pages.block is None:
        wanted = jnp.where(ledger.is_running(slots), wish.places, 0)
        places = num_places = jnp.maximum(pages.places, wanted)
        if wish.drafts is not None:
            places = jnp.maximum(pages.places, wanted + wish.drafts)
    growth = missing_pages(pages.places, places, page_size=size)
    owned, _ = counted_pages.num_owned(slots, pages.length, group, pages.places, size)
    held = jnp.sum(owned, dtype=jnp.int32)
    used = held + jnp.sum(growth + copies, dtype=jnp.int32)
    enough = used <= capacity.num_pages
    _, num_rows, num_drafts = wish.within(capacity.token_budget)
    granted = GrantedPlan(
        num_rows=jnp.where(enough, num_rows, 0),
        num_drafts=None if num_drafts is None else jnp.where(enough, num_drafts, 0),
        num_places=num_places,
        num_copied=jnp.where(enough, jnp.sum(copies, dtype=jnp.int32), 0),
        used_pages=jnp.where(enough, used, held),
        enough=enough,
    )
    if (window := capacity.window) is not None:
        rows = granted.num_rows
        if granted.num_drafts is not None:
            rows = rows + granted.num_drafts
        written = missing_pages(pages.length, pages.length + rows, page_size=size)
        num = counted_pages.num_window_pages(slots, pages.length, group, window, size)
        num += jnp.sum(written, dtype=jnp.int32) + granted.num_copied
        granted = granted._replace(used_window_pages=num)
    return pages._replace(places=jnp.where(enough, places, pages.places)), granted


def release_drafts(pages: CountedPages, granted: GrantedPlan) -> CountedPages:
    """Releases the places that were reserved for rejected drafts."""
    if granted.num_drafts is None:
        return pages
    places = jnp.maximum(granted.num_places, pages.length)
    places = jnp.where(granted.num_drafts > 0, places, pages.places)
    return pages._replace(places=places)
