"""One step of serving: schedule, reserve pages, run the model, sample, finish.

`step` is a pure function of (params, state); `run_steps` scans it. Both are written to
be jitted or mapped by the caller. A step never waits for the host.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from jaxkv import arrays, ledger, scheduling, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import (
    counts,
    drafting,
    groups,
    model_runner,
    paging,
    plan_application,
)
from jaxkv.engine.drafting import Drafter, Drafts, Speculation, VerifyOutput
from jaxkv.engine.emitting import (
    LogitsFn,
    SamplerOutput,
    StepPages,
    advance_grammars,
    constrain_logits,
    emit,
    follow_drafts,
    pad_drafts,
    record_pages,
    record_routes,
)
from jaxkv.engine.paging import StatePlan, evict_tokens
from jaxkv.engine.state import (
    ALL_KINDS,
    NOT_ENDED,
    EngineConfig,
    EngineState,
    RequestKinds,
)
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.memory import (
    Eviction,
    Violations,
    count_prefix_faults,
    count_state_faults,
    count_swap_faults,
    move_tokens,
    shared_writes,
    window_table,
)
from jaxkv.memory import violations as count_violations
from jaxkv.models import Forward
from jaxkv.sampling import GrammarTables
from jaxkv.scheduling import Policy


class StepInfo(NamedTuple):
    """Per-step information for logging, metrics and plots."""

    tokens: Int32[Array, "slots emit_width"]
    """Sampled tokens; the first `num_emitted` of each slot are valid."""
    num_emitted: Int32[Array, " slots"]
    """Number of valid tokens."""
    logprobs: Float[Array, "slots emit_width"]
    """Log-probabilities of the tokens, where requested."""
    sequence: Int32[Array, " slots"]
    """Row of `Sequences` in each slot during the step, or `NO_SEQUENCE`."""
    request_id: Int32[Array, " slots"]
    """Request of each slot; -1 where the slot is empty or held."""
    sample: Int32[Array, " slots"]
    """Index of the sequence in its request."""
    reason: Int32[Array, " slots"]
    """Finish reason of a sequence that ended in this step, an index into
    `FINISH_REASONS`; else 0."""
    num_rows: Int32[Array, " slots"]
    """Tokens fed, drafts included."""
    held: Bool[Array, " slots"]
    """Slots kept by a finished sequence."""
    num_waiting: Int32[Array, ""]
    """Requests in the queue, including those that have not arrived yet. In the trace of
    an `Engine`, requests that wait on the host are included as well."""
    num_preempted: Int32[Array, ""]
    """Sequences preempted."""
    num_swapped_out: Int32[Array, ""]
    """Preempted sequences that were swapped out; the rest are recomputed."""
    num_swapped_in: Int32[Array, ""]
    """Sequences swapped in."""
    num_admitted: Int32[Array, ""]
    """Requests admitted."""
    num_copied: Int32[Array, ""]
    """Pages copied before a write because they are shared (copy-on-write)."""
    used_pages: Int32[Array, ""]
    """Pages in use while the step ran."""
    used_places: Int32[Array, ""]
    """Token places with K and V of running sequences at the end of the step; shared
    places count once."""
    asks_host: Bool[Array, ""]
    """True if the host should move swapped pages, see `swapping.asks_host`."""
    enough: Bool[Array, ""]
    """True if the plan's pages were available; if not, the step fed no tokens."""
    violations: Violations | None
    """Violated invariants at the end of the step; None unless in debug mode."""
    num_drafts: Int32[Array, " slots"] | None = None
    """Drafts fed; `num_emitted - 1` of them were accepted. None without speculation."""
    is_disabled: Bool[Array, ""] | None = None
    """True if the drafter is disabled for the next call, see `Drafter.is_disabled`;
    None if it cannot be."""
    used_window_pages: Int32[Array, ""] | None = None
    """Pages of layers with a window in use while the step ran, those of swapped
    sequences included; None unless they return behind the window."""
    pages: StepPages | None = None
    """None unless `EngineConfig.record_pages` is set."""

    def __repr__(self) -> str:
        """One line with the numbers of steps and slots."""
        shape = getattr(self.num_rows, "shape", ())
        return f"StepInfo({' x '.join(map(str, shape))} slots)"


def step(
    params: PyTree[ArrayOrShape],
    state: EngineState,
    *,
    config: EngineConfig,
    forward: Forward,
    policy: Policy,
    eviction: Eviction | None = None,
    logits_fn: LogitsFn | None = None,
    speculation: Speculation | None = None,
    kinds: RequestKinds = ALL_KINDS,
    grammars: GrammarTables | None = None,
) -> tuple[EngineState, StepInfo]:
    """Runs one step.

    Args:
      params: parameters of the model, the first argument of `forward`.
      state: the engine.
      config: its configuration, static.
      forward: the model, static.
      policy: the scheduling policy, a pytree of arrays.
      eviction: the eviction rule of the prefix cache, a pytree of arrays; None means
        `prefix_eviction.LRU()`.
      logits_fn: changes logits before sampling, static.
      speculation: drafter and verifier, static; None decodes without speculation.
      kinds: kinds of the requests in the state, static; others get wrong answers.
      grammars: grammars of the requests, with `EngineConfig.max_grammars`.

    Returns:
      The new state, and the information about the step.
    """
    params, state = arrays.to_jax_arrays((params, state))
    drafter = None if speculation is None else speculation.drafter
    state, applied = plan_step(
        state,
        config=config,
        policy=policy,
        eviction=eviction,
        drafter=drafter,
        kinds=kinds,
    )
    num_rows = applied.num_rows
    granted = applied.granted
    most_rows = num_rows if granted is None else num_rows + granted
    state = paging.map_windows(state, most_rows, config)
    planned = state
    drafts = None
    if drafter is not None:
        assert applied.granted is not None  # `schedule` grants drafts to a drafter
        state, drafts = drafting.propose(
            params, state, applied.granted, drafter, config
        )
        drafts = follow_drafts(state, drafts, grammars)
    # Drafts are fed after the rows of their slot; `num_rows` excludes them.
    forks = groups.find_forks(state, num_rows, kinds)
    state, state_plan = paging.plan_states(
        state, num_rows, None if drafts is None else drafts.num, config
    )
    result = model_runner.feed(
        params,
        state,
        num_rows if drafts is None else num_rows + drafts.num,
        forks,
        drafts,
        state_plan,
        config=config,
        forward=forward,
    )
    state = state._replace(pages=result.pages)
    with jax.named_scope("advance"):
        state = groups.advance_and_fork(
            state, num_rows, forks, config, kinds, state_plan
        )
    has_logits = (num_rows > 0) | (forks >= 0)
    logits_fn = constrain_logits(logits_fn, grammars)
    with jax.named_scope("emit"):
        state, emitted = emit(
            state, has_logits, result, logits_fn, config, speculation, drafts, kinds
        )
    state = advance_grammars(state, emitted, grammars)
    if drafter is not None:
        state = _accept(state, emitted, applied, drafts, drafter, state_plan, config)
    state = paging.trim_windows(state, config)
    state = evict_tokens(state, emitted.reason != NOT_ENDED, config)
    state = _retire(state, emitted, scheduling.holds_finished(policy), eviction)
    info = _info(planned, applied, emitted, state, config, kinds)
    if config.record_pages:
        pages = record_pages(
            planned,
            result.pages,
            applied.copies,
            info.num_rows,
            drafts,
            emitted.verified,
            config,
        )
        info = info._replace(pages=pages)
    if config.debug:
        unsafe = shared_writes(
            planned.pool, planned.table, info.num_rows, page_size=config.page_size
        )
        if (windows := planned.windows) is not None:
            table = window_table(windows, planned.table)
            unsafe += shared_writes(
                windows.pool, table, info.num_rows, page_size=config.page_size
            )
        info = info._replace(violations=_audit(state, config)._replace(i3=unsafe))
    return state, info


@jax.named_scope("accept")
def _accept(
    state: EngineState,
    emitted: SamplerOutput,
    applied: plan_application.AppliedPlan,
    drafts: Drafts | None,
    drafter: Drafter,
    state_plan: StatePlan | None,
    config: EngineConfig,
) -> EngineState:
    """Keeps accepted drafts, releases rejected ones, and updates the drafter."""
    verified = emitted.verified
    assert verified is not None
    if drafts is not None and drafts.tree is not None:
        state = _compact_accepted_path(state, verified)
    # The last emitted token is not fed yet; an answer may end before its last draft.
    num = jnp.where(verified.num_drafts > 0, emitted.num_emitted - 1, 0)
    # Without granted drafts there are no reserved places to release.
    assert applied.granted is not None
    state = arrays.update_if(
        jnp.any(applied.granted > 0),
        functools.partial(groups.accept_drafts, state_plan=state_plan, config=config),
        state,
        jnp.maximum(num, 0),
        applied.num_places,
    )
    memory = drafter.learn(state.memory, state, verified)
    return state._replace(memory=memory)


def _compact_accepted_path(state: EngineState, verified: VerifyOutput) -> EngineState:
    """Moves K and V of the accepted drafts of a tree to the places of their tokens."""
    index = jnp.arange(verified.path.shape[1], dtype=jnp.int32)[None, :]
    accepted = jnp.where(verified.num_drafts > 0, verified.accepted, 0)
    stays = index < jnp.where(verified.emits, accepted, 0)[:, None]
    length = state.table.length[:, None]
    pages = move_tokens(
        state.pages,
        state.table.page_ids,
        length - 1 + verified.path,
        jnp.where(stays, length + index, -1),
    )
    if (windows := state.windows) is not None:
        assert pages.windowed is not None
        windowed = move_tokens(
            pages.windowed,
            windows.page_ids,
            length - 1 + verified.path,
            jnp.where(stays, length + index, -1),
        )
        pages = pages._replace(windowed=windowed)
    return state._replace(pages=pages)


@jax.named_scope("info")
def _info(
    planned: EngineState,
    applied: plan_application.AppliedPlan,
    emitted: SamplerOutput,
    state: EngineState,
    config: EngineConfig,
    kinds: RequestKinds,
) -> StepInfo:
    """Makes the `StepInfo` from the state after planning and the state at the end."""
    s = planned.sequences
    running = planned.slots.sequence
    # Finished sequences have released their pages; slot indices did not change.
    after = state.with_slots(planned.slots)
    held = state.slots.held
    assert held is not None  # `state.init` makes flags
    num_free = planned.pool.num_free + paging.num_idle(planned)
    num_rows = applied.num_rows
    num_drafts = None
    if emitted.verified is not None:
        num_drafts = emitted.verified.num_drafts
        num_rows = num_rows + num_drafts
    return StepInfo(
        tokens=emitted.tokens,
        num_emitted=emitted.num_emitted,
        logprobs=emitted.logprobs,
        sequence=running,
        request_id=arrays.take(s.request_id, running, fill=-1),
        sample=arrays.take(s.params.sample, running, fill=0),
        reason=emitted.reason,
        num_rows=num_rows,
        held=held,
        num_waiting=state.ledger.num_waiting,
        **applied.scheduling._asdict(),
        num_copied=applied.num_copied,
        used_pages=config.num_pages - num_free,
        used_places=counts.used_places(after, config, kinds),
        asks_host=paging.asks_host(state),
        enough=applied.enough,
        violations=None,
        num_drafts=num_drafts,
        used_window_pages=paging.num_used_window_pages(planned),
    )


def plan_step(
    state: EngineState,
    *,
    config: EngineConfig,
    policy: Policy,
    eviction: Eviction | None = None,
    drafter: Drafter | None = None,
    kinds: RequestKinds = ALL_KINDS,
) -> tuple[EngineState, plan_application.AppliedPlan]:
    """Plans one step and applies the plan: all of a step before the model runs.

    Returns:
      The new state, with all pages reserved that the step writes; and the applied plan.
    """
    with jax.named_scope("counts"):
        observed, prefix_match = counts.observe_engine(state, config, drafter, kinds)
    with jax.named_scope("schedule"):
        plan = scheduling.schedule(observed, policy)
    with jax.named_scope("apply_plan"):
        state, applied = plan_application.apply_plan(
            state, plan, prefix_match, config, eviction, kinds
        )
    return state, applied


@validation.checks_numbers()
def run_steps(
    params: PyTree[ArrayOrShape],
    state: EngineState,
    clock: Int32[Array, " 2"],
    *,
    config: EngineConfig,
    forward: Forward,
    policy: Policy,
    eviction: Eviction | None = None,
    logits_fn: LogitsFn | None = None,
    speculation: Speculation | None = None,
    may_draft: bool = True,
    num_steps: int | None = None,
    kinds: RequestKinds = ALL_KINDS,
    grammars: GrammarTables | None = None,
) -> tuple[EngineState, StepInfo]:
    """Runs several steps as one program; arguments are those of `step`.

    Requests that arrive after `clock`, in seconds and microseconds, are not admitted.
    With `may_draft=False`, static, the steps run without drafts, which is faster where
    `StepInfo.is_disabled` is True. `num_steps` is static; None means
    `config.steps_per_call`. Callers should donate the state.

    Returns:
      The new state, and the `StepInfo` of all steps, stacked.
    """
    params, state, clock = arrays.to_jax_arrays((params, state, clock))
    state = state._replace(ledger=state.ledger._replace(clock=clock))
    drafter = None if speculation is None else speculation.drafter
    length = config.steps_per_call if num_steps is None else num_steps
    step_config = config
    if not may_draft:
        step_config = dataclasses.replace(config, max_drafts=0)
        speculation = None

    def body(state: EngineState, _: None) -> tuple[EngineState, jax.tree_util.Partial]:
        state, info = step(
            params,
            state,
            config=step_config,
            forward=forward,
            policy=policy,
            eviction=eviction,
            logits_fn=logits_fn,
            speculation=speculation,
            kinds=kinds,
            grammars=grammars,
        )
        with jax.named_scope("info"):
            return state, arrays.pack_leaves(info)

    state, infos = lax.scan(body, state, None, length=length)
    return _finish_call(state, infos(), drafter, may_draft, config)


@jax.named_scope("rest")
def _finish_call(
    state: EngineState,
    infos: StepInfo,
    drafter: Drafter | None,
    may_draft: bool,
    config: EngineConfig,
) -> tuple[EngineState, StepInfo]:
    """Pads the infos of a call without drafts, and sets `StepInfo.is_disabled`."""
    if drafter is None:
        return state, infos
    num_steps = infos.enough.shape[0]
    if not may_draft:
        wide = ((0, 0), (0, 0), (0, config.max_drafts))
        infos = infos._replace(
            tokens=jnp.pad(infos.tokens, wide),
            logprobs=jnp.pad(infos.logprobs, wide),
            num_drafts=jnp.zeros_like(infos.num_rows),
        )
        if infos.pages is not None:
            infos = infos._replace(pages=pad_drafts(infos.pages, config))
        state = state._replace(memory=drafter.on_skipped(state.memory, num_steps))
    disabled = drafter.is_disabled(state.memory, state, config)
    if disabled is not None:
        infos = infos._replace(is_disabled=jnp.broadcast_to(disabled, (num_steps,)))
    return state, infos


def _audit(state: EngineState, config: EngineConfig) -> Violations:
    """Counts violated invariants at the end of a step."""
    live = ledger.is_occupied(state.slots)
    violations = count_violations(
        state.pool,
        state.table,
        live,
        page_size=config.page_size,
        pins=paging.pinned_pages(state),
    )
    of_windows = paging.count_window_violations(state, live, config)
    if of_windows is not None:
        violations = jax.tree.map(jnp.add, violations, of_windows)
    if state.prefixes is not None:
        violations = violations._replace(
            i7=count_prefix_faults(state.prefixes, state.pool)
        )
    if state.states is not None:
        violations = violations._replace(
            states=count_state_faults(state.states, state.table.length)
        )
    if state.staging is None:
        return violations
    books = state.ledger
    waits = ledger.PROGRESS.read(books.progress, "num_tokens") > 0
    waits &= ledger.EVENTS.read(books.events, "finish_s") == 0
    waits = arrays.put(waits, state.slots.sequence, False)
    faults = count_swap_faults(
        state.staging, state.sequences.group, waits, page_size=config.page_size
    )
    return violations._replace(swap=faults)


@jax.named_scope("retire")
def _retire(
    state: EngineState,
    emitted: SamplerOutput,
    holds_finished: bool,
    eviction: Eviction | None,
) -> EngineState:
    """Records first tokens and ends, and empties the slots of ended sequences."""
    before = state.slots
    reason = emitted.reason
    ended = reason != NOT_ENDED
    slots = before if holds_finished else before._replace(held=None)
    slots, is_retired = ledger.retire(slots, ended)
    held = before.held if slots.held is None else slots.held
    sequence = jnp.where(ended, NO_SEQUENCE, slots.sequence)

    def note(
        state: EngineState, begins: Array, reason: Array, is_retired: Array
    ) -> EngineState:
        books = state.ledger
        length = state.table.position
        ended = reason != NOT_ENDED
        state = record_routes(state, ended)
        row = jnp.where(ended, state.slots.sequence, NO_SEQUENCE)
        books = ledger.note_events(books, begins, ended, length)
        progress = ledger.PROGRESS.write(
            books.progress, row, num_tokens=books.slots.num_tokens
        )
        s = state.sequences
        state = state._replace(
            ledger=books._replace(progress=progress),
            sequences=s._replace(reason=arrays.put(s.reason, row, reason)),
        )
        return paging.release_slots(state, is_retired, eviction)

    state = arrays.update_if(
        jnp.any(emitted.begins | ended | is_retired),
        note,
        state,
        emitted.begins,
        reason,
        is_retired,
    )
    return state.with_slots(state.slots._replace(sequence=sequence, held=held))
