"""The engine's scheduler with a clock in place of the model.

The policy, `schedule` and its counts are the engine's own; tokens and pages are only
counted, and a cost model says how long each step takes. What happens is the same, step
for step, as long as sequences end at their limits. All of it is one pure function of
arrays, so `vmap` sweeps rates, seeds, sizes of the pool and parameters of policies.

Sequences of one request share pages as in `forking` and `tables`: those that the prompt
has filled, and a partial one until they write. Who was preempted by recomputation has
only the prompt in common with the others.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.clock import advance, later
from jaxkv.engine import NOBODY
from jaxkv.memory import demand
from jaxkv.scheduling import interface
from jaxkv.simulation import accepting, apply_plan, batch, contiguous
from jaxkv.simulation import work as step_work
from jaxkv.simulation.accepting import Acceptance
from jaxkv.simulation.batch import Line
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.counts import look, observe, reserve
from jaxkv.simulation.state import Capacity, Events, Progress, Simulation
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
    drew: Int32[Array, " line"]
    """The sequences that drew tokens at its end, NOBODY elsewhere."""
    enough: Bool[Array, ""]
    """Whether the pages that the policy asked for were there; if not, nothing ran."""
    num_drawn: Int32[Array, " line"] | None = None
    """How many each drew, drafts that were accepted among them; None if nobody guesses
    any, and each drew one."""


def init(
    workload: Workload,
    capacity: Capacity,
    policy: interface.Policy,
    *,
    max_slots: int,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
) -> Simulation:
    """Makes an idle machine, its clock at zero.

    Args:
      workload: the requests, in order of arrival.
      capacity: bounds. A request that they do not let in even alone is rejected, as
        `submit` does: nothing is ever recorded of it.
      policy: who will run.
      max_slots: sequences that can run at once, static.
      max_samples: sequences that a request may have, static.
      head: the largest for which `step` will be called.
      reservation: contiguous places for each request, in place of pages.

    Returns:
      The state; donate it to the programs that step it.

    Raises:
      ValueError: a size is below 1; or several sequences of a request, which share
        nothing in contiguous places: let them be requests.
    """
    w, c = arrays.on_device((workload, capacity))
    max_slots = validation.integer("max_slots", max_slots, low=1)
    max_samples = validation.integer("max_samples", max_samples, low=1)
    if head is not None:
        head = validation.integer("head", head, low=1)
    if reservation is not None and max_samples > 1:
        raise ValueError(f"{max_samples=} must be 1 where places are contiguous")
    fits = _fits_alone(w, c, max_slots, reservation)
    num = w.prompt.shape[0] * max_samples

    # A fresh buffer each: the state is donated, and no buffer can be donated twice.
    def zero() -> Array:
        return jnp.zeros((), jnp.int32)

    def nobody() -> Array:
        return jnp.zeros((max_slots,), bool)

    return Simulation(
        clock=jnp.zeros((2,), jnp.int32),
        line=batch.empty(
            max_slots,
            has_groups=max_samples > 1,
            holds=policy.holds_finished,
            has_blocks=reservation is not None,
        ),
        began=nobody(),
        ended=nobody(),
        left=jnp.full((max_slots,), NOBODY, jnp.int32),
        left_with=jnp.zeros((max_slots, len(Progress._fields)), jnp.int32),
        queue=jnp.full((max_slots + (head or max_slots),), NOBODY, jnp.int32),
        num_taken=zero(),
        num_swapped=zero(),
        num_done=zero(),
        progress=jnp.zeros((num, len(Progress._fields)), jnp.int32),
        events=jnp.zeros((num, len(Events._fields)), jnp.int32),
        order=jnp.argsort(~fits, stable=True).astype(jnp.int32),
        num_served=jnp.sum(fits, dtype=jnp.int32),
    )


def _fits_alone(
    w: Workload, c: Capacity, max_slots: int, reservation: Reservation | None
) -> Bool[Array, " requests"]:
    """Which requests an idle machine could serve."""
    size = c.page_size
    shared, own = demand.at_most(w.prompt, w.prompt + w.output, page_size=size)
    fits = shared + w.samples * own <= c.num_pages
    fits &= (w.prompt + w.output <= c.max_length) & (w.samples <= max_slots)
    fits &= w.samples > 0
    if reservation is not None:
        r = reservation
        asked = contiguous.asked(r.rule, w.prompt, w.output, c.max_length)
        fits &= contiguous.order_of(asked, size) <= contiguous.largest(r.idle)
    return fits


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
      state: the machine.
      workload: the requests.
      capacity: bounds.
      policy: who runs; the same that the engine takes.
      cost: how long it takes.
      max_samples: as for `init`.
      head: requests at the head of the queue that the policy sees, at most as many as
        there are slots, static; None means so many, like in the engine.
      reservation: as for `init`.
      acceptance: how many drafts are guessed, and which are accepted; None decodes
        plainly, and leaves speculation out of the program.

    Returns:
      The new state, and what happened.
    """
    state, workload, capacity = arrays.on_device((state, workload, capacity))
    state, (info, behind) = _step(
        *(state, workload, capacity, policy, cost),
        max_samples=max_samples,
        head=head,
        reservation=reservation,
        acceptance=acceptance,
    )
    return state, _all_waiting(state, workload, info, behind)


class _Behind(NamedTuple):
    """By what those are counted who have come and stand behind the queue."""

    num_taken: Int32[Array, "*steps"]
    """Requests that have entered the queue."""
    num_asked: Int32[Array, "*steps"]
    """Requests that the clients have asked by now, if they have come."""


def _all_waiting(
    state: Simulation, workload: Workload, info: StepInfo, behind: _Behind
) -> StepInfo:
    """Adds to those in the queue, of one step or many, the ones behind it.

    Of many at a time, since a search in each step would take a tenth of its time.
    """
    come = apply_plan.num_arrived(state, workload, info.start)
    come = jnp.minimum(come, behind.num_asked)
    return info._replace(num_waiting=info.num_waiting + come - behind.num_taken)


def _step(
    state: Simulation,
    w: Workload,
    capacity: Capacity,
    policy: interface.Policy,
    cost: Cost,
    *,
    max_samples: int,
    head: int | None,
    reservation: Reservation | None,
    acceptance: Acceptance | None,
) -> tuple[Simulation, tuple[StepInfo, _Behind]]:
    """Runs one step; only those in the queue are counted as waiting."""
    state, plan, wish, done = _plan_step(
        *(state, w, capacity, policy, max_samples, head, reservation, acceptance)
    )
    line, runs = state.line, batch.is_running(state.line)
    group = batch.groups(line, max_samples)
    line, granted = _grant(line, group, wish, capacity, reservation)
    request = jnp.maximum(line.sequence, 0) // max_samples
    prompt, output = w.prompt[request], w.output[request]
    work = step_work.of_rows(line, granted.num_rows, granted.num_drafts, prompt)
    line, forked = _feed(line, group, granted.num_rows)
    emits = ((granted.num_rows > 0) | forked) & runs & (line.length == line.known)
    drawn = emits.astype(jnp.int32)
    if acceptance is not None:
        line, drawn = _accept(
            line, emits, granted, prompt + output, acceptance, max_samples
        )
        accepted = jnp.sum(drawn - emits.astype(jnp.int32), dtype=jnp.int32)
        work = work._replace(num_accepted=accepted)
    work = work._replace(
        num_drawn=jnp.sum(drawn, dtype=jnp.int32),
        num_copied=granted.num_copied,
        num_swapped=done.num_moved,
    )
    clock, micros = _advance(state, w, work, runs, cost)
    split, saved = _split(line, group, prompt, output, capacity, reservation)
    known = line.known + drawn
    ended = emits & (known == prompt + output)
    info = StepInfo(
        start=state.clock,
        micros=micros,
        work=work,
        num_running=jnp.sum(runs, dtype=jnp.int32),
        num_waiting=jnp.sum(state.queue >= 0, dtype=jnp.int32),
        num_admitted=done.num_admitted,
        num_preempted=jnp.sum(plan.preempt, dtype=jnp.int32),
        num_finished=jnp.sum(ended, dtype=jnp.int32),
        used_pages=granted.used_pages,
        split=split,
        saved_pages=saved,
        drew=jnp.where(emits, line.sequence, NOBODY),
        enough=granted.enough,
        num_drawn=None if acceptance is None else drawn,
    )
    behind = _Behind(state.num_taken, state.num_done + w.clients)
    return state._replace(
        clock=clock,
        line=_give_back(line, granted)._replace(known=known),
        began=emits & (known == prompt + drawn),
        ended=ended,
    ), (info, behind)


def _plan_step(
    state: Simulation,
    w: Workload,
    capacity: Capacity,
    policy: interface.Policy,
    max_samples: int,
    head: int | None,
    reservation: Reservation | None,
    acceptance: Acceptance | None,
) -> tuple[Simulation, interface.Plan, apply_plan.Wish, apply_plan.Done]:
    """Decides one step, and lets sequences out and in."""
    state, whose = apply_plan.retire(state, max_samples)
    state = apply_plan.arrive(state, w, head or whose.shape[0])
    queued = look(state, w, head or whose.shape[0], max_samples)
    if reservation is not None:
        queued = reserve(state, queued, w, capacity, reservation)
    counts = observe(state, queued, capacity, max_samples)
    if acceptance is not None:
        drafts = accepting.wishes(state.line, w, acceptance, max_samples)
        counts = counts._replace(drafts=drafts)
    plan = interface.schedule(counts, policy)
    state, wish, done = apply_plan.apply_plan(
        state, plan, queued, capacity, max_samples, whose
    )
    return state, plan, wish, done


def _split(
    line: Line,
    group: batch.Groups | None,
    prompt: Int32[Array, " line"],
    output: Int32[Array, " line"],
    capacity: Capacity,
    reservation: Reservation | None,
) -> tuple[batch.Split, Int32[Array, ""]]:
    """What places in use are good for, and the pages that sharing saves."""
    asked = None
    if (r := reservation) is not None:
        asked = contiguous.asked(r.rule, prompt, output, capacity.max_length)
    return batch.split(line, group, prompt + output, capacity.page_size, asked)


class _Granted(NamedTuple):
    """What a step gets of what its plan asks for: everything or nothing."""

    num_rows: Int32[Array, " line"]
    """Rows of each place, drafts apart."""
    num_drafts: Int32[Array, " line"] | None
    kept: Int32[Array, " line"]
    """Token places that each holds, those for drafts apart."""
    num_copied: Int32[Array, ""]
    used_pages: Int32[Array, ""]
    enough: Bool[Array, ""]


def _grant(
    line: Line,
    group: batch.Groups | None,
    wish: apply_plan.Wish,
    capacity: Capacity,
    reservation: Reservation | None,
) -> tuple[Line, _Granted]:
    """Grants pages to all or to nobody, as `page_table.reserve` does."""
    size = capacity.page_size
    copies = batch.num_copies(line, group, wish.num_rows, size)
    places = kept = line.places  # with a reservation, all that is ever needed
    if reservation is None:
        wanted = jnp.where(batch.is_running(line), wish.places, 0)
        places = kept = jnp.maximum(line.places, wanted)
        if wish.drafts is not None:
            places = jnp.maximum(line.places, wanted + wish.drafts)
    growth = demand.growth(line.places, places, page_size=size)
    owned, _ = batch.num_owned(line, group, line.places, size)
    held = jnp.sum(owned, dtype=jnp.int32)
    used = held + jnp.sum(growth + copies, dtype=jnp.int32)
    enough = used <= capacity.num_pages
    return line._replace(places=jnp.where(enough, places, line.places)), _Granted(
        num_rows=jnp.where(enough, wish.num_rows, 0),
        num_drafts=None if wish.drafts is None else jnp.where(enough, wish.drafts, 0),
        kept=kept,
        num_copied=jnp.where(enough, jnp.sum(copies, dtype=jnp.int32), 0),
        used_pages=jnp.where(enough, used, held),
        enough=enough,
    )


def _accept(
    line: Line,
    emits: Bool[Array, " line"],
    granted: _Granted,
    limit: Int32[Array, " line"],
    acceptance: Acceptance,
    max_samples: int,
) -> tuple[Line, Int32[Array, " line"]]:
    """Counts accepted drafts as written, and says how many tokens each place draws."""
    assert granted.num_drafts is not None
    accepted = accepting.num_accepted(acceptance, line, granted.num_drafts, max_samples)
    # Of an answer that ends only what it has, and its last token is never fed.
    drawn = jnp.where(emits, jnp.minimum(accepted + 1, limit - line.known), 0)
    length = line.length + jnp.maximum(drawn - 1, 0)
    return line._replace(length=length), drawn


def _give_back(line: Line, granted: _Granted) -> Line:
    """Gives back what was reserved for drafts that were turned down."""
    if granted.num_drafts is None:
        return line
    places = jnp.maximum(granted.kept, line.length)
    places = jnp.where(granted.num_drafts > 0, places, line.places)
    return line._replace(places=places)


def _advance(
    state: Simulation,
    w: Workload,
    work: Work,
    runs: Bool[Array, " line"],
    cost: Cost,
) -> tuple[Int32[Array, " 2"], Int32[Array, ""]]:
    """The clock after a step, and how long it took; the next arrival ends a wait."""
    busy = work.num_decodes + work.num_prompt_rows + work.num_swapped > 0
    seconds = jnp.asarray(cost(work), jnp.float32)
    clock, micros = advance(state.clock, jnp.where(busy, seconds, 0.0))
    idle = ~jnp.any(runs) & (state.queue[0] < 0) & (state.num_taken < state.num_served)
    upcoming = state.order[jnp.minimum(state.num_taken, state.order.size - 1)]
    return jnp.where(idle, later(clock, w.arrival[upcoming]), clock), micros


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

    def body(state: Simulation, _: None) -> tuple[Simulation, tuple[StepInfo, _Behind]]:
        return _step(
            *(state, workload, capacity, policy, cost),
            max_samples=max_samples,
            head=head,
            reservation=reservation,
            acceptance=acceptance,
        )

    state, (infos, behind) = lax.scan(body, state, None, length=num_steps)
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

    It also ends where nothing moves any more, since the policy admits nobody. Then
    `num_done` is below `num_served`, and `outcomes.read` says whom it concerns, as it
    does for requests that could never be served. Arguments are those of `init` and
    `step`; `max_steps` ends it soon after so many, static, for policies that never come
    to an end.

    Returns:
      The state in the end.

    Raises:
      ValueError: as for `init`.
    """
    state = init(
        *(workload, capacity, policy),
        max_slots=max_slots,
        max_samples=max_samples,
        head=head,
        reservation=reservation,
    )

    def one(state: Simulation, _: None) -> tuple[Simulation, Array]:
        after, info = step(
            *(state, workload),
            capacity=capacity,
            policy=policy,
            cost=cost,
            max_samples=max_samples,
            head=head,
            reservation=reservation,
            acceptance=acceptance,
        )
        work = info.work
        did = work.num_decodes + work.num_prompt_rows + work.num_swapped > 0
        jumped = jnp.any(after.clock != state.clock)
        return after, did | jumped | (after.num_done > state.num_done)

    def some(carry: tuple[Simulation, Array, Array]) -> tuple[Simulation, Array, Array]:
        state, _, num_steps = carry
        state, moves = lax.scan(one, state, None, length=_STEPS_TOGETHER)
        return state, jnp.any(moves), num_steps + _STEPS_TOGETHER

    def goes_on(carry: tuple[Simulation, Array, Array]) -> Array:
        state, moves, num_steps = carry
        return moves & (state.num_done < state.num_served) & (num_steps < max_steps)

    start = (state, jnp.ones((), bool), jnp.zeros((), jnp.int32))
    return lax.while_loop(goes_on, some, start)[0]


_STEPS_TOGETHER = 128
"""Steps between two looks at whether all is done: mapped, each look copies the states
of those that are."""


def _feed(
    line: Line, group: batch.Groups | None, num_rows: Array
) -> tuple[Line, Bool[Array, " line"]]:
    """Writes the rows, and forks those for whom another one has read."""
    length = line.length + num_rows
    s = line.siblings
    if s is None or group is None:
        return line._replace(length=length), jnp.zeros_like(line.returned)
    complete = group.any(s.reads & (length == s.common))
    forked = s.waits & complete
    return line._replace(
        length=jnp.where(forked, s.common, length),
        places=jnp.where(forked, s.common, line.places),
        siblings=s._replace(
            reads=s.reads & ~complete,
            waits=s.waits & ~complete,
            forked=s.forked | forked,
        ),
    ), forked
