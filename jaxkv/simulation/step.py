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

from jaxkv import arrays
from jaxkv.clock import advance, later
from jaxkv.engine import NOBODY
from jaxkv.scheduling import interface
from jaxkv.simulation import accepting, apply_plan, batch, contiguous
from jaxkv.simulation import work as step_work
from jaxkv.simulation.accepting import Acceptance
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.counts import look, observe, reserve
from jaxkv.simulation.state import Capacity, Simulation, init
from jaxkv.simulation.work import Cost, Work
from jaxkv.workloads import Workload


class StepInfo(NamedTuple):
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
    split: batch.Split
    """What their token places are good for."""
    saved_pages: Int32[Array, ""]
    """Pages that were in use more, did nobody share."""
    drew: Int32[Array, " slots"]
    """The sequences that drew tokens at its end, NOBODY elsewhere."""
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


type _Behind = tuple[Int32[Array, "*steps"], Int32[Array, "*steps"]]
"""Requests that have entered the queue; requests that the clients have asked by now,
if they have come."""


def step(
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
) -> tuple[Simulation, StepInfo]:
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
    state, workload, capacity = arrays.on_device((state, workload, capacity))
    it = Members(workload, capacity, policy, cost, reservation, acceptance)
    state, (info, behind) = _step(state, it, max_samples, head)
    return state, _all_waiting(state, workload, info, behind)


def _all_waiting(
    state: Simulation, workload: Workload, info: StepInfo, behind: _Behind
) -> StepInfo:
    """Adds to those in the queue, of one step or many, the ones behind it.

    Of many at a time, since a search in each step would take a tenth of its time.
    """
    num_taken, num_asked = behind
    come = apply_plan.num_arrived(state, workload, info.start)
    num_behind = jnp.minimum(come, num_asked) - num_taken
    return info._replace(num_waiting=info.num_waiting + num_behind)


def _step(
    state: Simulation, it: Members, max_samples: int, head: int | None
) -> tuple[Simulation, tuple[StepInfo, _Behind]]:
    """Runs one step; only those in the queue are counted as waiting."""
    w, capacity, _, _, reservation, acceptance = it
    state, whose = apply_plan.retire(state, max_samples)
    head = head or whose.shape[0]
    state = apply_plan.arrive(state, w, head)
    queued = look(state, w, head, max_samples)
    if reservation is not None:
        queued = reserve(state, queued, w, capacity, reservation)
    counts = observe(state, queued, w, capacity, max_samples)
    if acceptance is not None:
        drafts = accepting.wishes(state.slots, w, acceptance, max_samples)
        counts = counts._replace(drafts=drafts)
    plan = interface.schedule(counts, it.policy)
    state, wish, num_admitted, num_moved = apply_plan.apply_plan(
        state, plan, queued, capacity, max_samples, whose
    )
    # All rows are fed, or none; sequences whose known tokens are all fed draw.
    runs, group = batch.is_running(state.slots), batch.groups(state.slots, max_samples)
    slots, granted = apply_plan.grant(state.slots, group, wish, capacity, reservation)
    request = jnp.maximum(slots.sequence, 0) // max_samples
    prompt, output = w.prompt[request], w.output[request]
    limit = prompt + output
    work = step_work.of_rows(slots, granted.num_rows, granted.num_drafts, prompt)
    slots, forked = batch.feed(slots, group, granted.num_rows)
    emits = ((granted.num_rows > 0) | forked) & runs & (slots.length == slots.known)
    drawn = emits.astype(jnp.int32)
    if acceptance is not None:
        assert granted.num_drafts is not None
        slots, drawn = accepting.accept(
            slots, emits, granted.num_drafts, limit, acceptance, max_samples
        )
        accepted = jnp.sum(drawn - emits.astype(jnp.int32), dtype=jnp.int32)
        work = work._replace(num_accepted=accepted)
    work = work._replace(
        num_drawn=jnp.sum(drawn, dtype=jnp.int32),
        num_copied=granted.num_copied,
        num_swapped=num_moved,
    )
    known = slots.known + drawn
    ended = emits & (known == limit)
    # A step that feeds, moves, admits and preempts no sequence ends with the next
    # arrival. A policy may wait although requests have arrived.
    busy = work.num_decodes + work.num_prompt_rows + work.num_swapped > 0
    seconds = jnp.asarray(it.cost(work), jnp.float32)
    clock, micros = advance(state.clock, jnp.where(busy, seconds, 0.0))
    turns = (num_admitted > 0) | jnp.any(plan.preempt)
    idle = ~busy & ~turns & (state.num_taken < state.num_served)
    upcoming = state.order[jnp.minimum(state.num_taken, state.order.size - 1)]
    clock = jnp.where(idle, later(clock, w.arrival[upcoming]), clock)
    asked = None
    if (r := reservation) is not None:
        asked = contiguous.asked(r.rule, prompt, output, capacity.max_length)
    split, saved_pages = batch.split(slots, group, limit, capacity.page_size, asked)
    info = StepInfo(
        start=state.clock,
        micros=micros,
        work=work,
        num_running=jnp.sum(runs, dtype=jnp.int32),
        num_waiting=jnp.sum(state.queue >= 0, dtype=jnp.int32),
        num_admitted=num_admitted,
        num_preempted=jnp.sum(plan.preempt, dtype=jnp.int32),
        num_finished=jnp.sum(ended, dtype=jnp.int32),
        used_pages=granted.used_pages,
        split=split,
        saved_pages=saved_pages,
        drew=jnp.where(emits, slots.sequence, NOBODY),
        enough=granted.enough,
        num_drawn=None if acceptance is None else drawn,
    )
    behind = state.num_taken, state.num_done + w.clients
    slots = apply_plan.release_drafts(slots, granted)._replace(known=known)
    began = emits & (known == prompt + drawn)
    state = state._replace(clock=clock, slots=slots, began=began, ended=ended)
    return state, (info, behind)


def run_steps(
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
) -> tuple[Simulation, StepInfo]:
    """Runs several steps as one program; arguments are those of `step`.

    There are `num_steps`, static. Steps after everything is done do nothing.

    Returns:
      The new state, and the stacked infos of all steps. Everything is done and noted
      when `num_done` has reached `num_served`.
    """
    state, workload, capacity = arrays.on_device((state, workload, capacity))
    it = Members(workload, capacity, policy, cost, reservation, acceptance)
    state, (infos, behind) = lax.scan(
        lambda state, _: _step(state, it, max_samples, head),
        state,
        None,
        length=num_steps,
    )
    return state, _all_waiting(state, workload, infos, behind)


def run(
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
    that could never be served. Arguments are those of `init` and `step`; `max_steps`,
    static, ends it soon after so many steps.

    Returns:
      The state in the end.

    Raises:
      ValueError: as for `init`.
    """
    state = init(
        workload,
        capacity,
        policy,
        max_slots=max_slots,
        max_samples=max_samples,
        head=head,
        reservation=reservation,
    )
    workload, capacity = arrays.on_device((workload, capacity))
    it = Members(workload, capacity, policy, cost, reservation, acceptance)
    served = jnp.arange(state.order.size, dtype=jnp.int32) < state.num_served
    sizes = ((workload.prompt + workload.output) * workload.samples)[state.order]
    # In float32, since an int32 would be full after 2**31 tokens.
    num_tokens = jnp.sum(jnp.where(served, sizes.astype(jnp.float32), 0.0))

    def one(carry: tuple[Simulation, Array], _: None) -> Any:
        state, num_rows = carry
        after, (info, _behind) = _step(state, it, max_samples, head)
        rows = info.work.num_decodes + info.work.num_prompt_rows
        # Rows fed since the last token: more than all tokens are the same ones again.
        draws = info.work.num_drawn > 0
        num_rows = jnp.where(draws, 0.0, num_rows + rows.astype(jnp.float32))
        feeds = (rows > 0) & (num_rows <= num_tokens)
        waits = jnp.any(after.clock != state.clock) & (info.micros == 0)
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
