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
from jaxkv.ledger import NO_SEQUENCE, Groups, Slots
from jaxkv.memory import Eviction
from jaxkv.scheduling import NO_LIMIT, Policy
from jaxkv.simulation import (
    apply_plan,
    contiguous,
    counted_pages,
    sessions,
)
from jaxkv.simulation.acceptance import Acceptance, emit_tokens, wanted_draft_lengths
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.state import Capacity, Simulation, init_simulation
from jaxkv.simulation.work import Cost, Work, work_of_rows
from jaxkv.workloads import Dependencies, Workload


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
    used_window_pages: Int32[Array, ""] | None = None
    """Pages of layers with a window in use while the step ran, those of swapped
    sequences excluded; None unless they return behind it, see `Capacity.window`."""


class SimulationMember(NamedTuple):
    """Arguments of one simulation, or of several with a leading axis, see `stack`."""

    workload: Workload
    capacity: Capacity
    policy: Policy
    cost: Cost
    reservation: Reservation | None = None
    acceptance: Acceptance | None = None
    eviction: Eviction | None = None


type _QueueCounters = tuple[Int32[Array, "*steps"], Int32[Array, "*steps"]]
"""Requests that have entered the queue; requests that the clients of a closed loop
have sent, if they have arrived. With sessions, the first are requests with given times,
minus the requests after others that have arrived and not entered."""


@validation.checks_numbers()
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
    eviction: Eviction | None = None,
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
      eviction: `LRU` or `LinearEviction` of the prefix cache of a workload with chains;
        None means LRU.

    Returns:
      The new state, and the information about the step.
    """
    state, workload, capacity = arrays.to_jax_arrays((state, workload, capacity))
    counted_pages.check_eviction(eviction)
    it = SimulationMember(
        workload, capacity, policy, cost, reservation, acceptance, eviction
    )
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


class _Batch(NamedTuple):
    """The running batch after admission: columns by slot."""

    group: Groups | None
    """Groups of the slots; None if every request has one sequence."""
    request: Int32[Array, " slots"]
    prompt: Int32[Array, " slots"]
    """Tokens of the prompt."""
    output: Int32[Array, " slots"]
    """Tokens of the answer."""
    context: Int32[Array, " slots"] | None
    """Cached tokens before the prompt, see `Workload.context`."""

    @property
    def limit(self) -> Int32[Array, " slots"]:
        """Tokens of prompt and answer."""
        return self.prompt + self.output


class _Emission(NamedTuple):
    """The sequences that emit tokens in a step."""

    emits: Bool[Array, " slots"]
    num_emitted: Int32[Array, " slots"]
    """Emitted tokens, accepted drafts included."""
    ended: Bool[Array, " slots"]


def _step(
    state: Simulation, it: SimulationMember, max_samples: int, head: int | None
) -> tuple[Simulation, tuple[SimulatedStep, _QueueCounters]]:
    """Runs one step; `num_waiting` counts only requests in the queue."""
    head = head or state.ledger.slots.sequence.shape[0]
    state, arrival = _enqueue(state, it.workload, head)
    state, admitted = _plan(state, it, max_samples, head)
    batch = _look_up_batch(state.ledger.slots, it.workload, max_samples)
    pages, granted = apply_plan.grant(
        state.ledger.slots, state.pages, batch.group, admitted.plan, it.capacity
    )
    state = state._replace(pages=pages)
    if (cache := state.prefixes) is not None:
        num_idle = jnp.sum(cache.idle, dtype=jnp.int32)
        missing = granted.used_pages + num_idle - it.capacity.num_pages
        missing = jnp.where(granted.enough, missing, num_idle)
        state = state._replace(prefixes=counted_pages.evict_chains(cache, missing))
    state, work, draws = _feed(state, granted, batch)
    state, emission = _emit(state, granted, batch, draws, it.acceptance, max_samples)
    if it.capacity.evict_budget is not None:
        assert it.capacity.evict_limit is not None
        if it.acceptance is not None:
            raise ValueError("acceptance must be None with evict")
        pages = counted_pages.evict_counted(
            state.pages,
            ledger.is_running(state.ledger.slots) & ~emission.ended,
            batch.prompt,
            it.capacity.evict_budget,
            it.capacity.evict_limit,
        )
        state = state._replace(pages=pages)
    work = work._replace(
        num_drawn=jnp.sum(emission.num_emitted, dtype=jnp.int32),
        num_copied=granted.num_copied,
        num_swapped=admitted.num_swapped,
    )
    if it.acceptance is not None:
        num_accepted = emission.num_emitted - emission.emits.astype(jnp.int32)
        work = work._replace(num_accepted=jnp.sum(num_accepted, dtype=jnp.int32))
    info = _info(state, work, admitted, granted, batch, emission, it)
    counters = _count_taken(state), state.num_done + it.workload.clients
    clock, micros = _advance_clock(state, info, arrival, it.cost)
    state = state._replace(ledger=state.ledger._replace(clock=clock))
    if state.prefixes is not None:
        state = _release_pages(state, it, batch.request, emission.ended, info.start)
    state = _retire(state, granted, batch, emission, it.workload.dependencies)
    return state, (info._replace(micros=micros), counters)


def _enqueue(
    state: Simulation, workload: Workload, head: int
) -> tuple[Simulation, Int32[Array, " 2"]]:
    """Moves requests that have arrived into the queue.

    Returns:
      The new state, and the time of the next arrival.
    """
    if state.sessions is None:
        state = apply_plan.enqueue_arrivals(state, workload, head)
        upcoming = state.order[jnp.minimum(state.num_taken, state.order.size - 1)]
        return state, workload.arrival[upcoming]
    session_state, books, next_request = sessions.enqueue_due(
        state.sessions, state.ledger, state.order, head
    )
    num = books.num_waiting - state.ledger.num_waiting
    state = state._replace(
        ledger=books, num_taken=state.num_taken + num, sessions=session_state
    )
    return state, next_request.time


def _plan(
    state: Simulation, it: SimulationMember, max_samples: int, head: int
) -> tuple[Simulation, apply_plan.AdmittedBatch]:
    """Observes, schedules, preempts and admits."""
    observation = _observe(state, it, max_samples, head)
    slots = state.ledger.slots
    counts = observation.counts
    plan = scheduling.schedule(counts, it.policy)
    plan = ledger.preempt_groups(plan, slots, observation.group)
    if state.prefixes is not None:
        state = _release_pages(
            state, it, observation.request, plan.preempt, state.ledger.clock
        )
    state, admitted = apply_plan.preempt_and_admit(
        state, plan, observation, it.workload.prompt, it.capacity
    )
    if (cache := state.prefixes) is not None:
        num_pages = counts.waiting_cached // it.capacity.page_size
        num_pages = jnp.where(admitted.admitted, num_pages, 0)
        cache = counted_pages.use_chains(
            cache, it.workload, observation.head.request, num_pages
        )
        state = state._replace(prefixes=cache)
    return state, admitted


def _release_pages(
    state: Simulation,
    it: SimulationMember,
    request: Int32[Array, " slots"],
    is_released: Bool[Array, " slots"],
    now: Int32[Array, " 2"],
) -> Simulation:
    """Moves the full pages of released slots to the prefix cache."""
    assert state.prefixes is not None
    cache = counted_pages.release_chains(
        state.prefixes,
        it.workload,
        request,
        is_released,
        state.pages.length // it.capacity.page_size,
        now=now,
        eviction=it.eviction,
    )
    return state._replace(prefixes=cache)


def _observe(
    state: Simulation, it: SimulationMember, max_samples: int, head: int
) -> apply_plan.Observation:
    """Observes the batch and the queue, with the requested drafts in the counts."""
    observation = apply_plan.observe_simulation(
        state,
        it.workload,
        it.capacity,
        it.reservation,
        max_samples=max_samples,
        head=head,
    )
    if it.acceptance is None:
        return observation
    slots = state.ledger.slots
    drafts = wanted_draft_lengths(
        slots, state.pages.length, it.workload, it.acceptance, max_samples
    )
    counts = observation.counts._replace(drafts=drafts)
    return observation._replace(counts=counts)


@validation.checks_numbers()
def upcoming_counts(
    state: Simulation, member: SimulationMember, *, max_samples: int = 1, head: int
) -> scheduling.Counts:
    """Returns the counts that the policy gets in the next step.

    Args:
      state: the simulation.
      member: workload, bounds and policy.
      max_samples: as for `init_simulation`.
      head: waiting requests visible to the policy.
    """
    state, _ = _enqueue(state, member.workload, head)
    return _observe(state, member, max_samples, head).counts


def _look_up_batch(slots: Slots, w: Workload, max_samples: int) -> _Batch:
    """Looks up the requests of the running batch."""
    group = apply_plan.groups_by_request(slots, slots.sequence // max_samples)
    request = jnp.maximum(slots.sequence, 0) // max_samples
    return _Batch(
        group,
        request,
        prompt=w.prompt[request],
        output=w.output[request],
        context=None if w.context is None else w.context[request],
    )


def _feed(
    state: Simulation, granted: apply_plan.GrantedPlan, batch: _Batch
) -> tuple[Simulation, Work, Bool[Array, " slots"]]:
    """Counts the fed rows as written, and forks sequences.

    Returns:
      The new state, the work of the rows, and the sequences that draw a token: all of
      their known tokens are fed.
    """
    slots = state.ledger.slots
    pages = state.pages
    group = batch.group
    num_rows = granted.num_rows
    context = batch.context
    if (evicted := pages.evicted) is not None:
        context = -evicted if context is None else context - evicted
    work = work_of_rows(
        slots, pages.position, num_rows, granted.num_drafts, batch.prompt, context
    )
    length = pages.length + num_rows
    forked = jnp.zeros(length.shape, bool)
    if group is not None:
        fork = slots.fork
        assert fork is not None
        forked = fork.waits & group.any(fork.reads & (length == fork.num_common))
        length = jnp.where(forked, fork.num_common, length)
        places = jnp.where(forked, fork.num_common, pages.places)
        pages = pages._replace(places=places)
    slots = ledger.record_forks(slots, forked, length)
    draws = ((num_rows > 0) | forked) & ledger.is_running(slots)
    pages = pages._replace(length=length)
    draws &= pages.position == slots.num_tokens
    state = state._replace(ledger=state.ledger._replace(slots=slots), pages=pages)
    return state, work, draws


def _emit(
    state: Simulation,
    granted: apply_plan.GrantedPlan,
    batch: _Batch,
    emits: Bool[Array, " slots"],
    acceptance: Acceptance | None,
    max_samples: int,
) -> tuple[Simulation, _Emission]:
    """Draws the accepted drafts, and counts them as written."""
    slots = state.ledger.slots
    num_emitted = emits.astype(jnp.int32)
    if acceptance is not None:
        assert granted.num_drafts is not None
        length, num_emitted = emit_tokens(
            slots,
            state.pages.length,
            emits,
            granted.num_drafts,
            batch.limit,
            acceptance,
            max_samples,
        )
        state = state._replace(pages=state.pages._replace(length=length))
    ended = emits & (slots.num_tokens + num_emitted == batch.limit)
    return state, _Emission(emits, num_emitted, ended)


def _info(
    state: Simulation,
    work: Work,
    admitted: apply_plan.AdmittedBatch,
    granted: apply_plan.GrantedPlan,
    batch: _Batch,
    emission: _Emission,
    it: SimulationMember,
) -> SimulatedStep:
    """Makes the information about a step without its time, before sequences retire."""
    slots = state.ledger.slots
    num_reserved = None
    if it.reservation is not None:
        num_reserved = contiguous.reserved_places(
            it.reservation.rule, batch.prompt, batch.output, it.capacity.max_length
        )
    limit = batch.limit
    if (evicted := state.pages.evicted) is not None:
        assert it.capacity.evict_limit is not None
        limit = jnp.minimum(limit - evicted, it.capacity.evict_limit)
    memory, saved_pages = counted_pages.break_down(
        slots,
        state.pages,
        batch.group,
        limit,
        it.capacity.page_size,
        num_reserved,
    )
    return SimulatedStep(
        start=state.ledger.clock,
        micros=jnp.zeros((), jnp.int32),
        work=work,
        num_running=jnp.sum(ledger.is_running(slots), dtype=jnp.int32),
        num_waiting=state.ledger.num_waiting,
        num_admitted=admitted.num_admitted,
        num_preempted=admitted.num_preempted,
        num_finished=jnp.sum(emission.ended, dtype=jnp.int32),
        used_pages=granted.used_pages,
        split=memory,
        saved_pages=saved_pages,
        drew=jnp.where(emission.emits, slots.sequence, NO_SEQUENCE),
        enough=granted.enough,
        num_drawn=None if it.acceptance is None else emission.num_emitted,
        used_window_pages=granted.used_window_pages,
    )


def _count_taken(state: Simulation) -> Int32[Array, ""]:
    """Counts the first of `_QueueCounters`, before the clock advances."""
    if (s := state.sessions) is None:
        return state.num_taken
    num_due = jnp.sum(is_past(s.due, state.ledger.clock), dtype=jnp.int32)
    return s.num_roots_taken - num_due


def _advance_clock(
    state: Simulation, info: SimulatedStep, arrival: Int32[Array, " 2"], cost: Cost
) -> tuple[Int32[Array, " 2"], Int32[Array, ""]]:
    """Advances the clock by the time of the step's work, or to the next arrival.

    A step that feeds, moves, admits and preempts no sequence ends with the next
    arrival: a policy may wait although requests have arrived.

    Returns:
      The new clock, and the microseconds of the work.
    """
    work = info.work
    busy = work.num_decodes + work.num_prompt_rows + work.num_swapped > 0
    seconds = jnp.asarray(cost(work), jnp.float32)
    clock, micros = advance(info.start, jnp.where(busy, seconds, 0.0))
    turns = (info.num_admitted > 0) | (info.num_preempted > 0)
    idle = ~busy & ~turns & (state.num_taken < state.num_served)
    if state.sessions is not None:
        idle &= arrival[0] < sessions.NEVER_S
    return jnp.where(idle, latest(clock, arrival), clock), micros


def _retire(
    state: Simulation,
    granted: apply_plan.GrantedPlan,
    batch: _Batch,
    emission: _Emission,
    dependencies: Dependencies | None,
) -> Simulation:
    """Records first tokens and ends, and empties the slots of ended sequences."""
    slots = state.ledger.slots
    group = batch.group
    emits, num_emitted, ended = emission
    begins = emits & (slots.num_tokens == batch.prompt)
    over = ended
    if group is not None:
        goes_on = group.any(ledger.is_running(slots) & ~ended)
        over = group.is_first & group.any(ended) & ~goes_on
    slots = slots._replace(num_tokens=slots.num_tokens + num_emitted)
    books = ledger.note_events(
        state.ledger._replace(slots=slots), begins, ended, state.pages.position
    )
    session_state = state.sessions
    if session_state is not None:
        assert dependencies is not None
        answered = jnp.where(over, batch.request, NO_SEQUENCE)
        session_state = sessions.release_followers(
            session_state, dependencies, answered, books.clock
        )
    slots, is_retired = ledger.retire(books.slots, ended)
    pages = apply_plan.release_drafts(state.pages, granted)
    return state._replace(
        ledger=books._replace(slots=slots),
        pages=pages._replace(places=jnp.where(is_retired, 0, pages.places)),
        num_done=state.num_done + jnp.sum(over, dtype=jnp.int32),
        sessions=session_state,
    )


@validation.checks_numbers()
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
    eviction: Eviction | None = None,
) -> tuple[Simulation, SimulatedStep]:
    """Runs `num_steps` steps as one program; `num_steps` is static.

    The remaining arguments are those of `simulate_step`. The simulation is complete
    when `num_done` equals `num_served`; later steps do not change it.

    Returns:
      The new state, and the `SimulatedStep` of all steps, stacked.
    """
    state, workload, capacity = arrays.to_jax_arrays((state, workload, capacity))
    counted_pages.check_eviction(eviction)
    it = SimulationMember(
        workload, capacity, policy, cost, reservation, acceptance, eviction
    )
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
    eviction: Eviction | None = None,
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
    counted_pages.check_eviction(eviction)
    it = SimulationMember(
        workload, capacity, policy, cost, reservation, acceptance, eviction
    )
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
