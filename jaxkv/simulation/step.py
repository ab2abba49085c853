"""One step of a simulation: the engine's scheduling, and a cost model for the time.

Policy, ledger and `schedule` are those of the engine. Tokens and pages are only
counted, and a cost model returns the time of each step. If sequences end at their
length limits, the schedule equals that of the engine step for step. A step is a pure
function of arrays, so `vmap` can sweep arrival rates, seeds, pool sizes and parameters
of policies.

Sequences of one request share pages as in the engine (`engine/groups.py`): the full
pages of the prompt, and a partial page until the first write. After a preemption by
recomputation they share the prompt only.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, ledger, scheduling, validation
from jaxkv.clock import advance, is_past, latest
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.scheduling import NO_LIMIT, Policy
from jaxkv.simulation import apply_plan, contiguous, counted_pages, sessions
from jaxkv.simulation.acceptance import Acceptance, emit_tokens, wanted_draft_lengths
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.state import Capacity, Simulation, init_simulation
from jaxkv.simulation.work import Cost, Work, work_of_rows
from jaxkv.workloads import Workload


class SimulatedStep(NamedTuple):
    """Information about a step. A step that feeds and moves no tokens takes no time."""

    start: Int32[Array, " 2"]
    """Clock before the step: seconds and microseconds."""
    micros: Int32[Array, ""]
    """Duration of the step in microseconds."""
    work: Work
    """Work of the step, the input of the cost model."""
    num_running: Int32[Array, ""]
    """Running sequences."""
    num_waiting: Int32[Array, ""]
    """Requests that have arrived and wait, in the queue or beyond it."""
    num_admitted: Int32[Array, ""]
    """Requests admitted."""
    num_preempted: Int32[Array, ""]
    """Sequences preempted."""
    num_finished: Int32[Array, ""]
    """Sequences that ended."""
    used_pages: Int32[Array, ""]
    """Pages in use while the step ran."""
    split: counted_pages.MemoryBreakdown
    """Token places of these pages by their use."""
    saved_pages: Int32[Array, ""]
    """Pages saved by sharing: additional pages that would be in use without it."""
    drew: Int32[Array, " slots"]
    """Sequences that emitted tokens, or `NO_SEQUENCE`."""
    enough: Bool[Array, ""]
    """True if the plan's pages were available; if not, the step fed no tokens."""
    num_drawn: Int32[Array, " slots"] | None = None
    """Emitted tokens of each slot, accepted drafts included; None without speculation,
    where each sequence in `drew` emits one."""


class SimulationMember(NamedTuple):
    """Arguments of one simulation, or of several with a leading axis, see `stack`."""

    workload: Workload
    capacity: Capacity
    policy: Policy
    cost: Cost
    reservation: Reservation | None = None
    acceptance: Acceptance | None = None


type _QueueCounters = tuple[Int32[Array, "*steps"], Int32[Array, "*steps"]]
"""Requests that have entered the queue; requests that the clients of a closed loop
have sent, if they have arrived. With sessions, the first are requests with given times,
minus the requests after others that have arrived and not entered."""


def simulate_step(
    state: Simulation,
    workload: Workload,
    *,
    capacity: Capacity,
    policy: Policy,
    cost: Cost,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
    acceptance: Acceptance | None = None,
) -> tuple[Simulation, SimulatedStep]:
    """Runs one step, or advances the clock to the next arrival.

    Args:
      state: the simulation.
      workload: the requests.
      capacity: bounds.
      policy: the scheduling policy, as for the engine.
      cost: the cost model.
      max_samples: as for `init_simulation`.
      head: waiting requests visible to the policy, at most 511, static; None means
        `max_slots`, as in the engine.
      reservation: as for `init_simulation`.
      acceptance: draft length and acceptance rates; None compiles the step without
        speculation.

    Returns:
      The new state, and the information about the step.
    """
    state, workload, capacity = arrays.to_jax_arrays((state, workload, capacity))
    it = SimulationMember(workload, capacity, policy, cost, reservation, acceptance)
    state, (info, counters) = _step(state, it, max_samples, head)
    return state, _count_waiting(state, workload, info, counters)


def _count_waiting(
    state: Simulation, workload: Workload, info: SimulatedStep, counters: _QueueCounters
) -> SimulatedStep:
    """Adds requests that have arrived, but are not in the queue, to `num_waiting`.

    Done for many steps at a time: a search in each step would take 10 % of its time.
    """
    num_taken, num_asked = counters
    come = apply_plan.num_arrived(state, workload, info.start)
    num_outside = jnp.minimum(come, num_asked) - num_taken
    return info._replace(num_waiting=info.num_waiting + num_outside)


def _step(
    state: Simulation, it: SimulationMember, max_samples: int, head: int | None
) -> tuple[Simulation, tuple[SimulatedStep, _QueueCounters]]:
    """Runs one step; `num_waiting` counts only requests in the queue."""
    w, capacity, _, _, reservation, acceptance = it
    start = state.ledger.clock
    head = head or state.ledger.slots.sequence.shape[0]
    due = None
    if state.sessions is None:
        state = apply_plan.enqueue_arrivals(state, w, head)
    else:
        session_state, books, due = sessions.enqueue_due(
            state.sessions, state.ledger, state.order, head
        )
        num = books.num_waiting - state.ledger.num_waiting
        num_taken = state.num_taken + num
        state = state._replace(
            ledger=books, num_taken=num_taken, sessions=session_state
        )
    waiting, counts, head_pages = apply_plan.observe_simulation(
        state, w, capacity, reservation, max_samples=max_samples, head=head
    )
    if acceptance is not None:
        drafts = wanted_draft_lengths(
            state.ledger.slots, state.pages.length, w, acceptance, max_samples
        )
        counts = counts._replace(drafts=drafts)
    plan = scheduling.schedule(counts, it.policy)
    group = apply_plan.groups_by_request(state.ledger.slots, max_samples)
    plan = ledger.preempt_groups(plan, state.ledger.slots, group)
    state, wish, num_admitted, num_moved = apply_plan.preempt_and_admit(
        state, plan, waiting, head_pages, counts, capacity, w, max_samples
    )
    # Sequences whose known tokens are all fed emit a token.
    books = state.ledger
    slots = state.ledger.slots
    runs = ledger.is_running(slots)
    group = apply_plan.groups_by_request(slots, max_samples)
    pages, granted = apply_plan.grant(slots, state.pages, group, wish, capacity)
    request = jnp.maximum(slots.sequence, 0) // max_samples
    prompt = w.prompt[request]
    output = w.output[request]
    limit = prompt + output
    num_rows = granted.num_rows
    context = None if w.context is None else w.context[request]
    work = work_of_rows(
        slots, pages.length, num_rows, granted.num_drafts, prompt, context
    )
    length = pages.length + num_rows
    forked = jnp.zeros_like(runs)
    if group is not None:
        fork = slots.fork
        assert fork is not None
        forked = fork.waits & group.any(fork.reads & (length == fork.num_common))
        length = jnp.where(forked, fork.num_common, length)
        places = jnp.where(forked, fork.num_common, pages.places)
        pages = pages._replace(places=places)
    slots = ledger.record_forks(slots, forked, length)
    emits = ((num_rows > 0) | forked) & runs & (length == slots.num_tokens)
    num_emitted = emits.astype(jnp.int32)
    if acceptance is not None:
        assert granted.num_drafts is not None
        length, num_emitted = emit_tokens(
            slots, length, emits, granted.num_drafts, limit, acceptance, max_samples
        )
        accepted = jnp.sum(num_emitted - emits.astype(jnp.int32), dtype=jnp.int32)
        work = work._replace(num_accepted=accepted)
    pages = pages._replace(length=length)
    work = work._replace(
        num_drawn=jnp.sum(num_emitted, dtype=jnp.int32),
        num_copied=granted.num_copied,
        num_swapped=num_moved,
    )
    ended = emits & (slots.num_tokens + num_emitted == limit)
    # A step that feeds, moves, admits and preempts no sequence ends with the next
    # arrival. A policy may wait although requests have arrived.
    busy = work.num_decodes + work.num_prompt_rows + work.num_swapped > 0
    seconds = jnp.asarray(it.cost(work), jnp.float32)
    clock, micros = advance(start, jnp.where(busy, seconds, 0.0))
    turns = (num_admitted > 0) | jnp.any(plan.preempt)
    idle = ~busy & ~turns & (state.num_taken < state.num_served)
    if due is None:
        upcoming = state.order[jnp.minimum(state.num_taken, state.order.size - 1)]
        arrival = w.arrival[upcoming]
    else:
        arrival = due.time
        idle &= arrival[0] < sessions.NEVER_S
    clock = jnp.where(idle, latest(clock, arrival), clock)
    num_reserved = None
    if (r := reservation) is not None:
        num_reserved = contiguous.reserved_places(
            r.rule, prompt, output, capacity.max_length
        )
    memory, saved_pages = counted_pages.break_down(
        slots, pages, group, limit, capacity.page_size, num_reserved
    )
    info = SimulatedStep(
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
        num_drawn=None if acceptance is None else num_emitted,
    )
    num_taken = state.num_taken
    if (session_state := state.sessions) is not None:
        num_due = jnp.sum(is_past(session_state.due, start), dtype=jnp.int32)
        num_taken = session_state.num_roots_taken - num_due
    counters = num_taken, state.num_done + w.clients
    begins = emits & (slots.num_tokens == prompt)
    slots = slots._replace(num_tokens=slots.num_tokens + num_emitted)
    books = ledger.note_events(
        books._replace(slots=slots, clock=clock), begins, ended, length
    )
    over = ended
    if group is not None:
        goes_on = group.any(runs & ~ended)
        over = group.is_first & group.any(ended) & ~goes_on
    session_state = state.sessions
    if session_state is not None:
        assert w.dependencies is not None
        answered = jnp.where(over, request, NO_SEQUENCE)
        session_state = sessions.release_followers(
            session_state, w.dependencies, answered, clock
        )
    slots, is_retired = ledger.retire(books.slots, ended)
    pages = apply_plan.release_drafts(pages, granted)
    state = state._replace(
        ledger=books._replace(slots=slots),
        pages=pages._replace(places=jnp.where(is_retired, 0, pages.places)),
        num_done=state.num_done + jnp.sum(over, dtype=jnp.int32),
        sessions=session_state,
    )
    return state, (info, counters)


def simulate_steps(
    state: Simulation,
    workload: Workload,
    *,
    capacity: Capacity,
    policy: Policy,
    cost: Cost,
    num_steps: int,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
    acceptance: Acceptance | None = None,
) -> tuple[Simulation, SimulatedStep]:
    """Runs `num_steps` steps as one program; `num_steps` is static.

    The remaining arguments are those of `simulate_step`. The simulation is complete
    when `num_done` equals `num_served`; later steps do not change it.

    Returns:
      The new state, and the `SimulatedStep` of all steps, stacked.
    """
    state, workload, capacity = arrays.to_jax_arrays((state, workload, capacity))
    it = SimulationMember(workload, capacity, policy, cost, reservation, acceptance)
    state, (infos, counters) = lax.scan(
        lambda state, _: _step(state, it, max_samples, head),
        state,
        None,
        length=num_steps,
    )
    return state, _count_waiting(state, workload, infos, counters)


@validation.checks_numbers()
def simulate_workload(
    workload: Workload,
    capacity: Capacity,
    policy: Policy,
    cost: Cost,
    *,
    max_slots: int,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
    acceptance: Acceptance | None = None,
    max_steps: int = NO_LIMIT,
) -> Simulation:
    """Simulates a workload to its end; can be called under `jit` and `vmap`.

    The simulation also ends if the policy makes no progress, see `scheduling.stalls`.
    Then `num_done` is below `num_served`, and `outcomes.read_outcomes` warns about
    unfinished requests. Arguments are those of `init_simulation` and
    `simulate_step`. The
    simulation ends soon after `max_steps` steps; `max_steps` is static.

    Returns:
      The final state.

    Raises:
      ValueError: as for `init_simulation`.
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
    it = SimulationMember(workload, capacity, policy, cost, reservation, acceptance)
    served = jnp.arange(state.order.size, dtype=jnp.int32) < state.num_served
    sizes = ((workload.prompt + workload.output) * workload.samples)[state.order]
    # In float32, since the sum may exceed an int32.
    num_tokens = jnp.sum(jnp.where(served, sizes.astype(jnp.float32), 0.0))

    def one(carry: tuple[Simulation, Array], _: None) -> Any:
        state, num_rows = carry
        after, (info, _counters) = _step(state, it, max_samples, head)
        rows = info.work.num_decodes + info.work.num_prompt_rows
        # Rows since the last token beyond the number of all tokens are repetitions.
        draws = info.work.num_drawn > 0
        num_rows = jnp.where(draws, 0.0, num_rows + rows.astype(jnp.float32))
        feeds = (rows > 0) & (num_rows <= num_tokens)
        waits = jnp.any(after.ledger.clock != state.ledger.clock) & (info.micros == 0)
        moves = feeds | draws | waits | (after.num_done > state.num_done)
        return (after, num_rows), moves

    def run_chunk(carry: Any) -> Any:
        state, num_rows, _, num_steps = carry
        (state, num_rows), moves = lax.scan(
            one, (state, num_rows), None, length=_STEPS_TOGETHER
        )
        return state, num_rows, jnp.any(moves), num_steps + _STEPS_TOGETHER

    def goes_on(carry: Any) -> Array:
        state, _, moves, num_steps = carry
        return moves & (state.num_done < state.num_served) & (num_steps < max_steps)

    start = state, jnp.zeros(()), jnp.ones((), bool), jnp.zeros((), jnp.int32)
    return lax.while_loop(goes_on, run_chunk, start)[0]


_STEPS_TOGETHER = 128
"""Steps between checks for the end. Under `vmap`, each check copies the states of the
members that are done."""
