"""One step of serving: schedule, reserve pages, feed rows, draw tokens, stop.

`step` is a pure function of (params, state); `run_steps` scans it. Both are plain
Python to be jitted, mapped or scanned at the caller's rim. No step looks at the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import feeding, forwarding, paging, queueing, sampling, scheduling, tables
from jaxkv.states import (
    FINISHED,
    FULL,
    NOBODY,
    NOT_A_NUMBER,
    NOT_ENDED,
    RUNNING,
    STOPPED,
    TILE,
    WAITING,
    EngineConfig,
    EngineState,
)


class Answer(NamedTuple):
    """What a `logits_fn` may know of the sequences about to get a token."""

    tokens: Int32[Array, "rows max_length"]
    """Prompt and answer so far; meaningless beyond `num_tokens`."""
    num_tokens: Int32[Array, " rows"]
    """Tokens known."""
    prompt_length: Int32[Array, " rows"]
    """How many of them are the prompt."""
    request_id: Int32[Array, " rows"]
    """The caller's names."""


type LogitsFn = Callable[
    [Answer, Float[Array, "rows vocab"]], Float[Array, "rows vocab"]
]
"""Changes logits before penalties and cut-offs: masks, biases, grammars."""


class StepInfo(NamedTuple):
    """What a step did, for people, metrics and pictures; never fed back."""

    tokens: Int32[Array, "slots emit_width"]
    """Tokens drawn."""
    num_emitted: Int32[Array, " slots"]
    """How many of them count."""
    logprobs: Float[Array, "slots emit_width"]
    """Their log-probabilities, where asked for."""
    sequence: Int32[Array, " slots"]
    """Row of `Sequences` in each slot during the step, or NOBODY."""
    request_id: Int32[Array, " slots"]
    """Its request; -1 where the slot is empty or held."""
    reason: Int32[Array, " slots"]
    """Why it ended in this step, an index into `REASONS`; 0 if it did not."""
    num_rows: Int32[Array, " slots"]
    """Tokens fed."""
    held: Bool[Array, " slots"]
    """Slots kept by a finished sequence."""
    num_waiting: Int32[Array, ""]
    """Requests left in the queue."""
    num_preempted: Int32[Array, ""]
    """Sequences that gave way."""
    num_admitted: Int32[Array, ""]
    """Sequences that got a slot."""
    used_pages: Int32[Array, ""]
    """Pages in use while the step ran."""
    used_places: Int32[Array, ""]
    """Token places that held K and V of running sequences at its end."""
    enough: Bool[Array, ""]
    """Whether the pages that the policy asked for were there; if not, nothing ran."""
    violations: tables.Violations | None
    """Broken invariants at the end of the step, in debug mode."""


def step(
    params: Any,
    state: EngineState,
    *,
    config: EngineConfig,
    forward: forwarding.Forward,
    policy: scheduling.Policy,
    logits_fn: LogitsFn | None = None,
) -> tuple[EngineState, StepInfo]:
    """Runs one step.

    Args:
      params: parameters of the model, as `forward` takes them.
      state: the engine.
      config: its bounds, static.
      forward: the model, static.
      policy: who runs; a pytree whose leaves may be traced.
      logits_fn: changes logits before a token is drawn, static.

    Returns:
      The new state, and what happened.
    """
    plan = scheduling.schedule(_counts(state, config), policy)
    state, num_rows, enough = _carry_out(state, plan, config)
    used_pages = config.num_pages - state.pool.num_free
    running = state.slots.sequence
    result = feeding.feed(params, state, num_rows, config=config, forward=forward)
    state = state._replace(
        pages=result.pages, table=tables.advance(state.table, num_rows)
    )
    state, draw, num_emitted, reason = _emit(state, num_rows, result, logits_fn, config)
    state = _retire(state, reason != NOT_ENDED, policy.holds_finished)
    slots = state.slots
    return state, StepInfo(
        tokens=draw.token[:, None],
        num_emitted=num_emitted,
        logprobs=draw.logprob[:, None],
        sequence=running,
        request_id=paging.take(state.sequences.request_id, running, fill=-1),
        reason=reason,
        num_rows=num_rows,
        held=slots.held,
        num_waiting=state.queue.length,
        num_preempted=jnp.sum(plan.preempt, dtype=jnp.int32),
        num_admitted=jnp.sum(plan.admit, dtype=jnp.int32),
        used_pages=used_pages,
        used_places=jnp.sum(state.table.length, dtype=jnp.int32),
        enough=enough,
        violations=tables.violations(
            *(state.pool, state.table, (slots.sequence >= 0) | slots.held),
            page_size=config.page_size,
        )
        if config.debug
        else None,
    )


def run_steps(
    params: Any,
    state: EngineState,
    clock: Int32[Array, " 2"],
    *,
    config: EngineConfig,
    forward: forwarding.Forward,
    policy: scheduling.Policy,
    logits_fn: LogitsFn | None = None,
    num_steps: int | None = None,
) -> tuple[EngineState, StepInfo]:
    """Runs several steps as one program.

    Args:
      params: parameters of the model.
      state: the engine; donate it.
      clock: seconds and microseconds; requests that arrive later are not admitted.
      config: static.
      forward: static.
      policy: as in `step`.
      logits_fn: static.
      num_steps: how many, static; None means `config.steps_per_call`.

    Returns:
      The new state, and the stacked infos of all steps.
    """

    def body(state: EngineState, _: None) -> tuple[EngineState, StepInfo]:
        return step(
            params,
            state,
            config=config,
            forward=forward,
            policy=policy,
            logits_fn=logits_fn,
        )

    return lax.scan(
        body,
        state._replace(clock=clock),
        None,
        length=config.steps_per_call if num_steps is None else num_steps,
    )


def _counts(state: EngineState, config: EngineConfig) -> scheduling.Counts:
    """What the policy may know, in order of the line and of the queue."""
    s, line = state.sequences, state.slots.line
    sequence = state.slots.sequence[line]
    length = state.table.length[line]
    num_pages = tables.num_pages(state.table, page_size=config.page_size)
    head = state.queue.sequence[: config.max_slots]
    arrival = paging.take(s.arrival, head, fill=0)
    seconds, micros = state.clock[0], state.clock[1]
    arrived = (arrival[:, 0] < seconds) | (
        (arrival[:, 0] == seconds) & (arrival[:, 1] <= micros)
    )

    def of(values: Array, rows: Array) -> Array:
        return paging.take(values, rows, fill=0)

    return scheduling.Counts(
        running=sequence >= 0,
        held=state.slots.held[line],
        num_tokens=of(s.num_tokens, sequence),
        length=length,
        num_pages=num_pages[line],
        scored_prompt=of(s.prompt_scored, sequence)
        & (length < of(s.prompt_length, sequence)),
        waiting=(head >= 0) & arrived,
        waiting_tokens=of(s.num_tokens, head),
        waiting_scored_prompt=of(s.prompt_scored, head),
        free_pages=state.pool.num_free,
        page_size=config.page_size,
        max_length=config.max_length,
        token_budget=config.token_budget,
        spare_logit_rows=config.num_logit_rows - config.max_slots,
    )


class _Demand(NamedTuple):
    drop: Bool[Array, " slots"]
    places: Int32[Array, " slots"]


def _carry_out(
    state: EngineState, plan: scheduling.Plan, config: EngineConfig
) -> tuple[EngineState, Int32[Array, " slots"], Bool[Array, ""]]:
    """Preempts, admits and reserves; returns the rows of each slot."""
    s, slots, queue = state.sequences, state.slots, state.queue
    num_slots, line = config.max_slots, slots.line
    every = jnp.arange(num_slots, dtype=jnp.int32)

    def by_slot(values: Array) -> Array:
        return jnp.zeros_like(values).at[line].set(values, unique_indices=True)

    # Those who give way, by slot, and in order of the line for the queue.
    preempted = by_slot(plan.preempt)
    losers = jnp.where(plan.preempt, slots.sequence[line], NOBODY)
    sequence = jnp.where(preempted, NOBODY, slots.sequence)
    occupied = (sequence >= 0) | slots.held
    # The k-th request admitted gets the k-th free slot.
    head = queue.sequence[:num_slots]
    order = _packed(~occupied, every)
    rank = jnp.cumsum(plan.admit, dtype=jnp.int32) - 1
    slot = jnp.where(plan.admit, paging.take(order, rank, fill=NOBODY), NOBODY)

    def seat(values: Array, new: Array) -> Array:
        return paging.put(values, slot, new, "set")

    places = seat(by_slot(plan.places), plan.head_places)
    num_rows = seat(by_slot(plan.num_rows), plan.head_rows)
    sequence = seat(sequence, head)
    # The line: who stays, who is new, and the empty slots behind them.
    stays = occupied[line]
    still_free = jnp.where(occupied | (sequence >= 0), NOBODY, every)
    new_line = _packed(
        jnp.concatenate([stays, plan.admit, still_free >= 0]),
        jnp.concatenate([line, slot, still_free]),
    )[:num_slots]
    admitted = jnp.pad(plan.admit, (0, queue.sequence.shape[0] - num_slots))
    waits = jnp.where(admitted, NOBODY, queue.sequence)
    waits = jnp.concatenate([losers, waits])
    status = paging.put(s.status, losers, WAITING, "set")
    status = paging.put(status, jnp.where(plan.admit, head, NOBODY), RUNNING, "set")
    lost = jnp.where(plan.preempt, state.table.length[line], 0)
    pool, table, enough = tables.apply(
        *(state.pool, state.table, _Demand(preempted, places)),
        page_size=config.page_size,
        max_new_pages=config.max_pages_per_slot,
    )
    return (
        state._replace(
            pool=pool,
            table=table,
            sequences=s._replace(
                status=status,
                num_recomputed=paging.put(s.num_recomputed, losers, lost, "add"),
            ),
            slots=slots._replace(sequence=sequence, line=new_line),
            queue=queueing.pack_queue(waits, queue.sequence.shape[0]),
        ),
        jnp.where(enough, num_rows, 0),
        enough,
    )


def _packed(keep: Bool[Array, " n"], values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The kept values side by side, in order; NOBODY behind them."""
    place = jnp.where(keep, jnp.cumsum(keep, dtype=jnp.int32) - 1, NOBODY)
    return paging.put(jnp.full_like(values, NOBODY), place, values, "set")


def _emit(
    state: EngineState,
    num_rows: Int32[Array, " slots"],
    result: feeding.Fed,
    logits_fn: LogitsFn | None,
    config: EngineConfig,
) -> tuple[EngineState, sampling.Draw, Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Draws a token for every slot whose known tokens are all fed."""
    s, sequence = state.sequences, state.slots.sequence
    row = jnp.maximum(sequence, 0)
    num_tokens = s.num_tokens[row]
    emits = (num_rows > 0) & (state.table.length == num_tokens)
    answer = Answer(
        tokens=s.tokens[row],
        num_tokens=num_tokens,
        prompt_length=s.prompt_length[row],
        request_id=s.request_id[row],
    )
    logits = result.logits[: config.max_slots]
    params = jax.tree.map(lambda x: x[row], s.params)
    # An idle row must not make a batch look sampled, or scored.
    params = params._replace(temperature=jnp.where(emits, params.temperature, 0.0))
    scored = s.scored[row] & emits

    def draw_rows(answer, logits, params, scored) -> sampling.Draw:
        raw = logits
        if logits_fn is not None:
            logits = logits_fn(answer, logits)
        logits = sampling.penalise(
            logits, answer.tokens, answer.prompt_length, answer.num_tokens, params
        )
        return sampling.sample(
            logits, params, answer.num_tokens, raw=raw, scored=scored
        )

    def draw_all() -> sampling.Draw:
        rows = (answer, logits, params, scored)
        if config.numerics == "fast":
            return draw_rows(*rows)
        return _in_tiles(draw_rows, rows)

    blank = jax.eval_shape(draw_all)
    draw = lax.cond(
        jnp.any(emits),
        draw_all,
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank),
    )
    bad = emits & draw.invalid
    num_emitted = (emits & ~bad).astype(jnp.int32)
    place = jnp.where(num_emitted > 0, num_tokens, NOBODY)
    total = num_tokens + num_emitted
    stops = jnp.any(draw.token[:, None] == s.stop_tokens[row], axis=1)
    reason = jnp.where(total == s.limit[row], FULL, NOT_ENDED)
    reason = jnp.where(stops, STOPPED, reason)
    reason = jnp.where(emits, jnp.where(bad, NOT_A_NUMBER, reason), NOT_ENDED)

    def put(old: Array, index: Any, new: Array) -> Array:
        return paging.put(old, index, new, "set")

    now = jnp.broadcast_to(state.clock, (config.max_slots, 2))
    first = emits & ~bad & (num_tokens == s.prompt_length[row])
    ended = jnp.where(reason != NOT_ENDED, sequence, NOBODY)
    logprobs = put(s.logprobs, (sequence, place), draw.logprob.astype(jnp.float32))
    state = state._replace(
        sequences=s._replace(
            tokens=put(s.tokens, (sequence, place), draw.token),
            num_tokens=put(s.num_tokens, sequence, total),
            status=put(s.status, ended, jnp.full_like(ended, FINISHED)),
            reason=put(s.reason, ended, reason),
            first_token=put(s.first_token, jnp.where(first, sequence, NOBODY), now),
            finish=put(s.finish, ended, now),
            logprobs=_score_prompts(logprobs, s, result, config),
            **_alternatives(s, logits, sequence, place, scored, config),
        )
    )
    return state, draw, num_emitted, reason


def _in_tiles(function: Callable, rows: Any) -> Any:
    """Maps `function` over tiles of exactly `TILE` rows."""
    num = jax.tree.leaves(rows)[0].shape[0]
    short = -num % TILE

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, TILE, *x.shape[1:])

    tiles = lax.map(lambda tile: function(*tile), jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], tiles)


def _score_prompts(logprobs, s, result: feeding.Fed, config: EngineConfig) -> Array:
    """Keeps the log-probabilities of prompt tokens whose rows were spare logit rows."""
    if config.num_logit_rows == config.max_slots:
        return logprobs
    logits = result.logits[config.max_slots :]
    next_place = result.spare_position + 1
    token = paging.take(s.tokens, (result.spare_sequence, next_place), fill=0)
    wanted = result.spare_sequence >= 0
    values = lax.cond(
        jnp.any(wanted),
        lambda: sampling.token_logprobs(logits, token).astype(jnp.float32),
        lambda: jnp.zeros(logits.shape[0], jnp.float32),
    )
    return paging.put(logprobs, (result.spare_sequence, next_place), values, "set")


def _alternatives(s, logits, sequence, place, scored, config: EngineConfig) -> dict:
    """Keeps the most likely tokens where they are asked for."""
    if not config.max_logprobs:
        return {}
    rows, num = logits.shape[0], config.max_logprobs
    ids, values = lax.cond(
        jnp.any(scored),
        lambda: sampling.top_logprobs(logits, num),
        lambda: (
            jnp.zeros((rows, num), jnp.int32),
            jnp.zeros((rows, num), logits.dtype),
        ),
    )
    index = (jnp.where(scored, sequence, NOBODY), place)
    return {
        "top_ids": paging.put(s.top_ids, index, ids, "set"),
        "top_logprobs": paging.put(
            s.top_logprobs, index, values.astype(jnp.float32), "set"
        ),
    }


def _retire(
    state: EngineState, ended: Bool[Array, " slots"], holds_finished: bool
) -> EngineState:
    """Empties the slots of ended sequences, at once or when the whole batch is done."""
    slots = state.slots
    sequence = jnp.where(ended, NOBODY, slots.sequence)
    gone, held = ended, slots.held
    if holds_finished:
        occupied = held | ended
        done = ~jnp.any(sequence >= 0)
        gone, held = occupied & done, occupied & ~done
    pool, table = tables.drop(state.pool, state.table, gone)
    return state._replace(
        pool=pool, table=table, slots=slots._replace(sequence=sequence, held=held)
    )
