"""The engine's scheduler with a clock in place of the model.

The policy, `schedule` and its counts are the engine's own; tokens and pages are only
counted, and a cost model says how long each step takes. What happens is the same, step
for step, as long as sequences end at their limits. All of it is one pure function of
arrays, so `vmap` sweeps rates, seeds, sizes of the pool and parameters of policies.

Sequences of one request share pages as the engine's do (`engine/groups`): those that
the prompt has filled, and a partial one until they write. Who was preempted by
recomputation has only the prompt in common with the others.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, ledger
from jaxkv.clock import advance, latest
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.scheduling import interface
from jaxkv.simulation import accepting, apply_plan, contiguous, counted_pages
from jaxkv.simulation import work as step_work
from jaxkv.simulation.accepting import Acceptance
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.state import Capacity, Simulation, init_simulation
from jaxkv.simulation.work import Cost, Work
from jaxkv.workloads import Workload


class SimulationInfo(NamedTuple):
    """What a step did. One that fed nothing and moved nothing took no time."""

    start: Int32[Array, " 2"]
    """The clock before it."""
    micros: Int32[Array, ""]
    """How long it took."""
    work: Work
    num_running: Int32[Array, ""]
    """Sequences that have a slot."""
    num_waiting: Int32[Array, ""]
    """Requests that have arrived and have none, seen by the policy or not."""
    num_admitted: Int32[Array, ""]
    """Requests that got slots."""
    num_preempted: Int32[Array, ""]
    """Sequences that were preempted."""
    num_finished: Int32[Array, ""]
    """Sequences that ended."""
    used_pages: Int32[Array, ""]
    """Pages in use while the step ran."""
    split: counted_pages.MemoryBreakdown
    """What their token places are good for."""
    saved_pages: Int32[Array, ""]
    """Pages that were in use more, did nobody share."""
    drew: Int32[Array, " slots"]
    """The sequences that drew tokens at its end, `NO_SEQUENCE` elsewhere."""
    enough: Bool[Array, ""]
    """Whether the pages that the policy asked for were there; if not, nothing ran."""
    num_drawn: Int32[Array, " slots"] | None = None
    """How many each drew, drafts that were accepted among them; None if nobody guesses
    any, and each drew one."""


class Members(NamedTuple):
    """The arguments of one simulation; of many, with a leading axis, see `stack`."""

    workload: Workload
    capacity: Capacity
    policy: interface.Policy
    cost: Cost
    reservation: Reservation | None = None
    acceptance: Acceptance | None = None


type _Counters = tuple[Int32[Array, "*steps"], Int32[Array, "*steps"]]
"""Requests that have entered the queue; requests that the clients have asked by now,
if they have come."""


def simulate_step(
    state: Simulation,
    workload: Workload,
    *,
    capacity: Capacity,
    policy: interface.Policy,
    cost: Cost,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
    acceptance: Acceptance | None = None,
) -> tuple[Simulation, SimulationInfo]:
    """Runs one step, or lets the clock jump to the next arrival.

    Args:
      state: of the simulation.
      workload: the requests.
      capacity: bounds.
      policy: who runs; the same that the engine takes.
      cost: how long it takes.
      max_samples: as for `init`.
      head: requests at the head of the queue that the policy sees, at most 511, static;
        None means as many as there are slots, as in the engine.
      reservation: as for `init`.
      acceptance: how many drafts are guessed, and which are accepted; None decodes
        plainly, and leaves speculation out of the program.

    Returns:
      The new state, and what happened.
    """
    state, workload, capacity = arrays.to_jax_arrays((state, workload, capacity))
    it = Members(workload, capacity, policy, cost, reservation, acceptance)
    state, (info, counters) = _step(state, it, max_samples, head)
    return state, _all_waiting(state, workload, info, counters)


def _all_waiting(
    state: Simulation, workload: Workload, info: SimulationInfo, counters: _Counters
) -> SimulationInfo:
    """Adds the requests that have arrived and are not in the queue yet.

    For many steps at a time, since a search in each step takes a tenth of its time.
    """
    num_taken, num_asked = counters
    come = apply_plan.num_arrived(state, workload, info.start)
    num_outside = jnp.minimum(come, num_asked) - num_taken
    return info._replace(num_waiting=info.num_waiting + num_outside)


def _step(
    state: Simulation, it: Members, max_samples: int, head: int | None
) -> tuple[Simulation, tuple[SimulationInfo, _Counters]]:
    """Runs one step; only requests in the queue are counted as waiting."""
    w, capacity, _, _, reservation, acceptance = it
    start = state.ledger.clock
    head = head or state.ledger.slots.sequence.shape[0]
    state = apply_plan.arrive(state, w, head)
    waiting, counts, head_pages = apply_plan.observe_simulation(
        state, w, capacity, reservation, max_samples=max_samples, head=head
    )
    if acceptance is not None:
        drafts = accepting.wanted_draft_lengths(
            state.ledger.slots, state.pages.length, w, acceptance, max_samples
        )
        counts = counts._replace(drafts=drafts)
    plan = interface.schedule(counts, it.policy)
    state, wish, num_admitted, num_moved = apply_plan.apply_to_counts(
        state, plan, waiting, head_pages, counts, capacity, w, max_samples
    )
    # All rows are fed, or none; sequences whose known tokens are all fed draw.
    books, slots = state.ledger, state.ledger.slots
    runs, group = ledger.is_running(slots), apply_plan.groups(slots, max_samples)
    pages, granted = apply_plan.grant(slots, state.pages, group, wish, capacity)
    request = jnp.maximum(slots.sequence, 0) // max_samples
    prompt, output = w.prompt[request], w.output[request]
    limit, num_rows = prompt + output, granted.num_rows
    work = step_work.of_rows(slots, pages.length, num_rows, granted.num_drafts, prompt)
    length, forked = pages.length + num_rows, jnp.zeros_like(runs)
    if group is not None:
        fork = slots.fork
        assert fork is not None
        forked = fork.waits & group.any(fork.reads & (length == fork.num_common))
        length = jnp.where(forked, fork.num_common, length)
        places = jnp.where(forked, fork.num_common, pages.places)
        pages = pages._replace(places=places)
    slots = ledger.note_forks(slots, forked, length)
    emits = ((num_rows > 0) | forked) & runs & (length == slots.num_tokens)
    drawn = emits.astype(jnp.int32)
    if acceptance is not None:
        assert granted.num_drafts is not None
        length, drawn = accepting.accept_drafts(
            slots, length, emits, granted.num_drafts, limit, acceptance, max_samples
        )
        accepted = jnp.sum(drawn - emits.astype(jnp.int32), dtype=jnp.int32)
        work = work._replace(num_accepted=accepted)
    pages = pages._replace(length=length)
    work = work._replace(
        num_drawn=jnp.sum(drawn, dtype=jnp.int32),
        num_copied=granted.num_copied,
        num_swapped=num_moved,
    )
    ended = emits & (slots.num_tokens + drawn == limit)
    # A step that feeds, moves, admits and preempts no sequence ends with the next
    # arrival. A policy may wait although requests have arrived.
    busy = work.num_decodes + work.num_prompt_rows + work.num_swapped > 0
    seconds = jnp.asarray(it.cost(work), jnp.float32)
    clock, micros = advance(start, jnp.where(busy, seconds, 0.0))
    turns = (num_admitted > 0) | jnp.any(plan.preempt)
    idle = ~busy & ~turns & (state.num_taken < state.num_served)
    upcoming = state.order[jnp.minimum(state.num_taken, state.order.size - 1)]
    clock = jnp.where(idle, latest(clock, w.arrival[upcoming]), clock)
    asked = None
    if (r := reservation) is not None:
        asked = contiguous.asked(r.rule, prompt, output, capacity.max_length)
    memory, saved_pages = counted_pages.break_down(
        slots, pages, group, limit, capacity.page_size, asked
    )
    info = SimulationInfo(
        start=start,
        micros=micros,
        work=work,
        num_running=jnp.sum(runs, dtype=jnp.int32),
        num_waiting=books.num_waiting,
        num_admitted=num_admitted,
        num_preempted=jnp.sum(plan.preempt, dtype=jnp.int32),
        num_finished=jnp.sum(ended, dtype=jnp.int32),
        used_pages=granted.used_pages,
        split=memory,
        saved_pages=saved_pages,
        drew=jnp.where(emits, slots.sequence, NO_SEQUENCE),
        enough=granted.enough,
        num_drawn=None if acceptance is None else drawn,
    )
    counters = state.num_taken, state.num_done + w.clients
    begins = emits & (slots.num_tokens == prompt)
    slots = slots._replace(num_tokens=slots.num_tokens + drawn)
    books = ledger.note_events(
        books._replace(slots=slots, clock=clock), begins, ended, length
    )
    over = ended
    if group is not None:
        goes_on = group.any(runs & ~ended)
        over = group.is_first & group.any(ended) & ~goes_on
    slots, gone = ledger.retire(books.slots, ended)
    pages = apply_plan.release_drafts(pages, granted)
    state = state._replace(
        ledger=books._replace(slots=slots),
        pages=pages._replace(places=jnp.where(gone, 0, pages.places)),
        num_done=state.num_done + jnp.sum(over, dtype=jnp.int32),
    )
    return state, (info, counters)


def simulate_steps(
    state: Simulation,
    workload: Workload,
    *,
    capacity: Capacity,
    policy: interface.Policy,
    cost: Cost,
    num_steps: int,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
    acceptance: Acceptance | None = None,
) -> tuple[Simulation, SimulationInfo]:
    """Runs several steps as one program; arguments are those of `simulate_step`.

    There are `num_steps`, static. Steps after everything is done do nothing.

    Returns:
      The new state, and the stacked infos of all steps. Everything is done and noted
      when `num_done` has reached `num_served`.
    """
    state, workload, capacity = arrays.to_jax_arrays((state, workload, capacity))
    it = Members(workload, capacity, policy, cost, reservation, acceptance)
    state, (infos, counters) = lax.scan(
        lambda state, _: _step(state, it, max_samples, head),
        state,
        None,
        length=num_steps,
    )
    return state, _all_waiting(state, workload, infos, counters)


def simulate_workload(
    workload: Workload,
    capacity: Capacity,
    policy: interface.Policy,
    cost: Cost,
    *,
    max_slots: int,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
    acceptance: Acceptance | None = None,
    max_steps: int = interface.NO_LIMIT,
) -> Simulation:
    """Serves a workload to its end, in the caller's `jit` and `vmap` if there is one.

    It also ends where the policy makes no progress: it admits and feeds no request, or
    feeds the same rows over and over, see `scheduling.stalls`. Then `num_done` is below
    `num_served`, and `outcomes.read` warns and names a request, as it does for those
    that could never be served. Arguments are those of `init_simulation` and
    `simulate_step`; `max_steps`, static, ends it soon after so many steps.

    Returns:
      The state in the end.

    Raises:
      ValueError: as for `init`.
    """
    state = init_simulation(
        workload,
        capacity,
        policy,
        max_slots=max_slots,
        max_samples=max_samples,
        head=head,
        reservation=reservation,
    )
    workload, capacity = arrays.to_jax_arrays((workload, capacity))
    it = Members(workload, capacity, policy, cost, reservation, acceptance)
    served = jnp.arange(state.order.size, dtype=jnp.int32) < state.num_served
    sizes = ((workload.prompt + workload.output) * workload.samples)[state.order]
    # In float32, since an int32 would be full after 2**31 tokens.
    num_tokens = jnp.sum(jnp.where(served, sizes.astype(jnp.float32), 0.0))

    def one(carry: tuple[Simulation, Array], _: None) -> Any:
        state, num_rows = carry
        after, (info, _counters) = _step(state, it, max_samples, head)
        rows = info.work.num_decodes + info.work.num_prompt_rows
        # Rows fed since the last token: more than all tokens are the same ones again.
        draws = info.work.num_drawn > 0
        num_rows = jnp.where(draws, 0.0, num_rows + rows.astype(jnp.float32))
        feeds = (rows > 0) & (num_rows <= num_tokens)
        waits = jnp.any(after.ledger.clock != state.ledger.clock) & (info.micros == 0)
        moves = feeds | draws | waits | (after.num_done > state.num_done)
        return (after, num_rows), moves

    def some(carry: Any) -> Any:
        state, num_rows, _, num_steps = carry
        (state, num_rows), moves = lax.scan(
            one, (state, num_rows), None, length=_STEPS_TOGETHER
        )
        return state, num_rows, jnp.any(moves), num_steps + _STEPS_TOGETHER

    def goes_on(carry: Any) -> Array:
        state, _, moves, num_steps = carry
        return moves & (state.num_done < state.num_served) & (num_steps < max_steps)

    start = state, jnp.zeros(()), jnp.ones((), bool), jnp.zeros((), jnp.int32)
    return lax.while_loop(goes_on, some, start)[0]


_STEPS_TOGETHER = 128
"""Steps between two looks at whether all is done: mapped, each look copies the states
of those that are."""
