"""Carrying out a plan: who gives way, who gets a slot, which pages they get."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import paging, queueing, scheduling, tables
from jaxkv.states import NOBODY, RUNNING, WAITING, EngineConfig, EngineState


def counts(state: EngineState, config: EngineConfig) -> scheduling.Counts:
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
    num_rows: None = None


def carry_out(
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
    pool, table, _, enough = tables.apply(
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
