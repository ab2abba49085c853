"""The states of recurrent layers of running sequences: see `memory.state_pool`.

A step reads the state of each slot and writes states at some of its rows: at its last
known token, at each draft, and, with the prefix cache, at every `state_interval`-th
token. After verification the slot continues from the state at its last accepted token,
so rejected drafts need no correction. States at the interval become checkpoints of
their pages.

For models without recurrent layers no function changes the engine.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, memory
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import (
    NO_PAGE,
    NO_STATE,
    StatePool,
    StateRows,
    attach_states,
    replace_states,
)


class StatePlan(NamedTuple):
    """States that a step writes."""

    source: Int32[Array, " slots"]
    """State of each slot before its first row."""
    ids: Int32[Array, "slots outputs"]
    """States that its rows write, in order of positions."""
    start: Int32[Array, " slots"]
    """Position of its first row."""
    last: Int32[Array, " slots"]
    """Position of its last row that is no draft; `start - 1` without rows."""

    def num_before(
        self, position: Int32[Array, " slots"], interval: int
    ) -> Int32[Array, " slots"]:
        """Counts the states that rows of each slot before a position write."""
        end = jnp.minimum(position, self.last)
        num_checkpoints = end // interval - self.start // interval
        return num_checkpoints + jnp.maximum(position - self.last, 0)


def _interval(config: EngineConfig) -> int:
    """Returns the tokens between checkpoints; without a prefix cache there are none."""
    return config.state_interval if config.prefix_cache else config.max_length + 1


def plan_states(
    state: EngineState,
    num_rows: Int32[Array, " slots"],
    num_drafts: Int32[Array, " slots"] | None,
    config: EngineConfig,
) -> tuple[EngineState, StatePlan | None]:
    """Picks the states that a step writes.

    A slot without drafts overwrites its own state, unless that is shared.

    Args:
      state: the engine, with `length` not yet advanced.
      num_rows: rows of each slot, drafts excluded.
      num_drafts: drafts of each slot; None without a drafter.
      config: the engine's configuration.
    """
    if (pool := state.states) is None:
        return state, None
    interval = _interval(config)
    feeds = num_rows > 0
    start = state.table.length
    last = start + num_rows - 1
    drafts = jnp.zeros_like(num_rows) if num_drafts is None else num_drafts
    num_checkpoints = last // interval - start // interval
    source = pool.of_slot
    is_shared = arrays.take(pool.ref, source, fill=0) != 1
    is_shared |= arrays.take(
        memory.checkpointed(pool, state.prefixes), source, fill=True
    )
    in_place = feeds & ~is_shared & (drafts == 0)
    want = num_checkpoints + 1 + drafts - in_place.astype(jnp.int32)
    want = jnp.where(feeds, want, 0)
    width = 1 + config.max_drafts
    if config.prefix_cache:
        width += config.token_budget // interval + 1
    ids = jnp.full((config.max_slots, width), NO_STATE, jnp.int32)

    def allocate(carry: tuple[StatePool, Array], want: Array) -> tuple:
        pool, _ = carry
        return memory.allocate_states(pool, state.prefixes, want, max_states=width)

    pool, ids = arrays.update_if(jnp.any(want > 0), allocate, (pool, ids), want)
    rank = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_own = in_place[:, None] & (rank == num_checkpoints[:, None])
    ids = jnp.where(is_own, source[:, None], ids)
    return state._replace(states=pool), StatePlan(source, ids, start, last)


def locate_states(
    plan: StatePlan | None,
    slot: Int32[Array, " rows"] | None,
    position: Int32[Array, " rows"],
    config: EngineConfig,
) -> StateRows | None:
    """Returns the states of packed rows, or of equally many rows of each slot."""
    if plan is None:
        return None
    num_slots, width = plan.ids.shape
    if slot is None:
        slot = jnp.arange(position.shape[0], dtype=jnp.int32)
        slot //= position.shape[0] // num_slots
    slot = jnp.where(position >= 0, slot, -1)
    of_row = StatePlan(*(arrays.take(x, slot, fill=0) for x in plan))
    interval = _interval(config)

    def state_at(position: Array) -> Array:
        rank = of_row.num_before(position, interval)
        rank = jnp.where((slot >= 0) & (rank < width), rank, -1)
        return arrays.take(plan.ids, (slot, rank), fill=NO_STATE)

    source = jnp.where(position == of_row.start, of_row.source, state_at(position - 1))
    return StateRows(jnp.where(slot >= 0, source, NO_STATE), state_at(position))


def advance_states(
    state: EngineState,
    plan: StatePlan | None,
    before: Int32[Array, " slots"],
    config: EngineConfig,
) -> EngineState:
    """Makes slots continue from the states at their lengths, and keeps checkpoints.

    `before` are the lengths before the page table was advanced; its filled pages are in
    the prefix cache.
    """
    if plan is None or state.states is None:
        return state
    length = state.table.length
    interval = _interval(config)
    slot = jnp.arange(length.shape[0], dtype=jnp.int32)
    advances = length > before
    rank = jnp.where(advances, plan.num_before(length - 1, interval), -1)
    new = arrays.take(plan.ids, (slot, rank), fill=NO_STATE)
    pool = replace_states(state.states, advances, new)
    if state.prefixes is None:
        return state._replace(states=pool)
    # Position of each state: multiples of the interval up to `last`, then each one.
    index = jnp.arange(plan.ids.shape[1], dtype=jnp.int32)[None, :]
    num = (plan.last // interval - plan.start // interval)[:, None]
    multiple = (plan.start // interval)[:, None] + 1 + index
    end = jnp.where(index < num, multiple * interval, plan.last[:, None] + 1)
    end += jnp.maximum(index - num, 0)
    ends_here = (end > before[:, None]) & (end <= length[:, None])
    ends_here &= (end % interval == 0) & advances[:, None]
    column = jnp.where(ends_here, end // config.page_size - 1, -1)
    page = arrays.take(state.table.page_ids, (slot[:, None], column), fill=NO_PAGE)
    pool = arrays.update_if(
        jnp.any(ends_here),
        functools.partial(_attach, state),
        pool,
        page.reshape(-1),
        plan.ids.reshape(-1),
    )
    return state._replace(states=pool)


def _attach(
    state: EngineState, pool: StatePool, page_ids: Array, states: Array
) -> StatePool:
    assert state.prefixes is not None
    return attach_states(pool, state.prefixes, page_ids, states)


def fork_states(state: EngineState, source: Int32[Array, " slots"]) -> EngineState:
    """Makes slots share the states of other slots; -1 leaves a slot as it is."""
    if (pool := state.states) is None:
        return state
    states = arrays.take(pool.of_slot, source, fill=NO_STATE)
    return state._replace(states=replace_states(pool, source >= 0, states))


def move_states(state: EngineState, source: Int32[Array, " slots"]) -> EngineState:
    """Moves states with their slots, see `page_table.move_slots`."""
    if (pool := state.states) is None:
        return state
    of_slot = arrays.take(pool.of_slot, source, fill=NO_STATE)
    return state._replace(states=pool._replace(of_slot=of_slot))


def release_states(state: EngineState, mask: Bool[Array, " slots"]) -> EngineState:
    """Releases the states of masked slots."""
    if (pool := state.states) is None:
        return state
    none = jnp.full_like(pool.of_slot, NO_STATE)
    return state._replace(states=replace_states(pool, mask, none))


def start_on_checkpoints(
    state: EngineState,
    page_ids: Int32[Array, "head pages_per_slot"],
    slot: Int32[Array, " head"],
) -> EngineState:
    """Makes admitted requests continue from the checkpoints of their last pages.

    `page_ids` are the cached pages of each request, which end at a checkpoint; `slot`
    is its first slot, -1 if it was not admitted.
    """
    pool = state.states
    if pool is None or state.prefixes is None:
        return state
    num = jnp.sum(page_ids != NO_PAGE, axis=1, dtype=jnp.int32)
    head = jnp.arange(page_ids.shape[0], dtype=jnp.int32)
    page = arrays.take(page_ids, (head, num - 1), fill=NO_PAGE)
    states = memory.checkpoint_of(pool, state.prefixes, page)
    new = arrays.put(jnp.full_like(pool.of_slot, NO_STATE), slot, states)
    used = jnp.where(slot >= 0, states, NO_STATE)
    pool = pool._replace(
        last_used=arrays.put(pool.last_used, used, state.prefixes.tick)
    )
    return state._replace(states=replace_states(pool, new != NO_STATE, new))


def cut_to_checkpoints(
    state: EngineState, page_ids: Int32[Array, "head pages_per_slot"]
) -> Int32[Array, "head pages_per_slot"]:
    """Returns the cached pages of requests up to their last checkpoint."""
    if state.states is None or state.prefixes is None:
        return page_ids
    states = memory.checkpoint_of(state.states, state.prefixes, page_ids)
    column = jnp.arange(page_ids.shape[1], dtype=jnp.int32)[None, :]
    end = jnp.max(jnp.where(states != NO_STATE, column, -1), axis=1, keepdims=True)
    return jnp.where(column <= end, page_ids, NO_PAGE)


def has_room_to_swap(
    state: EngineState, leaves: Bool[Array, " slots"]
) -> Bool[Array, ""]:
    """Returns True if slots can keep their states while they are swapped out."""
    if (pool := state.states) is None:
        return jnp.ones((), bool)
    num = jnp.sum(leaves, dtype=jnp.int32)
    num += jnp.sum(pool.of_sequence != NO_STATE, dtype=jnp.int32)
    return num <= leaves.shape[0]


def swap_states_out(state: EngineState, mask: Bool[Array, " slots"]) -> EngineState:
    """Gives the states of swapped slots to their sequences."""
    if (pool := state.states) is None:
        return state
    row = jnp.where(mask, state.slots.sequence, -1)
    pool = pool._replace(
        of_sequence=arrays.put(pool.of_sequence, row, pool.of_slot),
        of_slot=jnp.where(mask, NO_STATE, pool.of_slot),
    )
    return state._replace(states=pool)


def swap_states_in(
    state: EngineState, slots: Int32[Array, " sequences"]
) -> EngineState:
    """Gives the states of sequences to their slots; -1 for sequences without one."""
    if (pool := state.states) is None:
        return state
    pool = pool._replace(
        of_slot=arrays.put(pool.of_slot, slots, pool.of_sequence),
        of_sequence=jnp.where(slots >= 0, NO_STATE, pool.of_sequence),
    )
    return state._replace(states=pool)


def forget_swapped_states(
    state: EngineState, mask: Bool[Array, " sequences"]
) -> EngineState:
    """Releases the states of masked sequences that are swapped out."""
    if (pool := state.states) is None:
        return state
    released = jnp.where(mask, pool.of_sequence, NO_STATE)
    pool = pool._replace(
        ref=arrays.put(pool.ref, released, -1, "add"),
        of_sequence=jnp.where(mask, NO_STATE, pool.of_sequence),
    )
    return state._replace(states=pool)


def forget_checkpoints(state: EngineState) -> EngineState:
    """Drops all checkpoints, for an emptied prefix cache."""
    if (pool := state.states) is None:
        return state
    return state._replace(states=pool._replace(page=jnp.full_like(pool.page, NO_PAGE)))
