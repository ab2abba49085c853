"""KV eviction in the engine: when it happens, and the pages that return.

These functions have no effect unless `EngineConfig.evict` is one of
`memory.EVICTION_RULES`. See `memory.kv_eviction`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, ledger, memory
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import evict_kv, eviction_due, feeding_end


def end_rows_at_eviction(
    state: EngineState, goal: Int32[Array, " slots"], config: EngineConfig
) -> Int32[Array, " slots"]:
    """Returns the length of the cache up to which each slot is to be fed.

    `goal` are the tokens that it must have fed in all.
    """
    evicted = state.table.evicted
    if evicted is None:
        return goal
    prompt = arrays.take(state.sequences.prompt_length, state.slots.sequence, fill=0)
    end = feeding_end(state.table.position, prompt, config.evict_limit)
    return jnp.minimum(jnp.maximum(goal - evicted, 0), end)


@jax.named_scope("evict")
def evict_tokens(
    state: EngineState, has_ended: Bool[Array, " slots"], config: EngineConfig
) -> EngineState:
    """Evicts tokens of slots where it is due, and releases their last pages."""
    table = state.table
    if config.evict not in memory.EVICTION_RULES:
        return state
    runs = ledger.is_running(state.slots) & ~has_ended
    prompt = arrays.take(state.sequences.prompt_length, state.slots.sequence, fill=0)
    after_prompt, in_answer = eviction_due(
        table.length, table.position, prompt, config.evict_budget, config.evict_limit
    )
    # An answer reads fewer pages.
    for is_due, num_tokens in (
        (after_prompt & runs, config.max_length),
        (in_answer & runs, min(config.evict_limit, config.max_length)),
    ):
        num_columns = -(-num_tokens // config.page_size)
        evict = functools.partial(_evict, num_columns=num_columns, config=config)
        state = arrays.update_if(jnp.any(is_due), evict, state, is_due)
    return state


def _evict(
    state: EngineState,
    is_due: Bool[Array, " slots"],
    *,
    num_columns: int,
    config: EngineConfig,
) -> EngineState:
    assert config.evict is not None
    table = state.table
    budget = config.evict_budget
    pages = evict_kv(
        state.pages,
        table.page_ids[:, :num_columns],
        table.length,
        table.position,
        is_due,
        rule=config.evict,
        budget=budget,
    )
    num_evicted = jnp.where(is_due, table.length - budget, 0)
    assert table.evicted is not None
    places = jnp.where(is_due, budget, table.length + table.ahead)
    table = table._replace(
        length=table.length - num_evicted,
        ahead=table.ahead + num_evicted,
        evicted=table.evicted + num_evicted,
    )
    pool, table = memory.truncate(state.pool, table, places, page_size=config.page_size)
    return state._replace(pages=pages, pool=pool, table=table)


def move_queries(state: EngineState, source: Int32[Array, " slots"]) -> EngineState:
    """Moves the queries of slots: each one gets those of `source`."""
    queries = state.pages.queries
    if queries is None:
        return state
    queries = queries[:, jnp.maximum(source, 0)]
    return state._replace(pages=state.pages._replace(queries=queries))
