"""Prefix caching in the engine: lookup, insertion, and eviction of pages.

An admitted request starts on the cached pages of its first tokens, with at least one
token left to feed. A page that a step fills is added to the cache at the end of the
step. If the cache already has a page of the same prefix, the sequence switches to the
cached page and releases its own. Two sequences with the same prompt in one step
therefore keep one copy, of the lower slot. Unused pages are evicted when pages are
needed. If the prefix cache is disabled, these functions have no effect.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from jaxkv import arrays, memory
from jaxkv.engine.paging import recurrent_states, window_pages
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import (
    CLOCK_SECONDS,
    NO_PAGE,
    Eviction,
    Pool,
    PrefixCache,
    Releases,
    Table,
    clear_slots,
    insert_unpinned,
    is_cached,
    is_idle,
    mark_idle,
    mark_used,
    release_counted,
)


class PrefixMatch(NamedTuple):
    """Longest cached prefix of each request at the head of the queue."""

    page_ids: Int32[Array, "head pages_per_slot"]
    """Cached pages of the first tokens, then `NO_PAGE`."""
    num_tokens: Int32[Array, " head"]
    """Tokens on these pages."""
    num_idle: Int32[Array, " head"]
    """Number of these pages that are idle, which count as free until they are used."""


def match_prefixes(
    state: EngineState,
    sequence: Int32[Array, " head"],
    num_tokens: Int32[Array, " head"],
    waits: Bool[Array, " head"],
    config: EngineConfig,
) -> PrefixMatch:
    """Finds the longest cached prefix of each waiting request.

    Args:
      state: the engine.
      sequence: row of the sequence of each request that feeds first.
      num_tokens: tokens that it has to feed.
      waits: mask of the rows to look up.
      config: the engine's configuration.
    """
    (num,) = sequence.shape
    cache = state.prefixes
    s = state.sequences
    no_pages = jnp.full((num, config.max_pages_per_slot), NO_PAGE, jnp.int32)
    if cache is None:
        return PrefixMatch(no_pages, *jnp.zeros((2, num), jnp.int32))
    # Without a free slot no request is admitted.
    wanted = waits & s.use_prefix_cache[sequence] & jnp.any(state.slots.sequence < 0)
    if state.search is not None:
        # The cache has no answers of beam search, whose tokens are in several rows.
        beam = state.search.width[s.group[sequence]] > 0
        prompt = s.prompt_length[sequence]
        num_tokens = jnp.where(beam, jnp.minimum(num_tokens, prompt), num_tokens)

    def look() -> tuple[Array, Array]:
        ids = memory.match(
            cache, s.tokens[sequence], num_tokens, s.salt[sequence], wanted
        )
        ids = recurrent_states.cut_to_checkpoints(state, ids)
        ids = window_pages.cut_to_windows(state, ids)
        marks = jnp.stack([ids != NO_PAGE, is_idle(cache.idle, ids)])
        return ids, jnp.sum(marks, axis=2, dtype=jnp.int32)

    def skip() -> tuple[Array, Array]:
        return no_pages, jnp.zeros((2, num), jnp.int32)

    ids, (num_pages, num_idle) = lax.cond(jnp.any(wanted), look, skip)
    return PrefixMatch(ids, num_pages * config.page_size, num_idle)


def num_idle(state: EngineState) -> Int32[Array, ""]:
    """Counts the cached pages that no sequence uses, which can be evicted."""
    if state.prefixes is None:
        return jnp.zeros((), jnp.int32)
    return state.prefixes.idle.num


def num_used(state: EngineState) -> Int32[Array, ""]:
    """Counts the cached pages that sequences use."""
    if state.prefixes is None:
        return jnp.zeros((), jnp.int32)
    return state.prefixes.num_pinned - state.prefixes.idle.num


def pinned_pages(state: EngineState) -> Bool[Array, " pages"] | None:
    """Returns a mask over all pages of those in the cache; for debug mode."""
    return None if state.prefixes is None else state.prefixes.pinned


def is_pinned(
    state: EngineState, page_ids: Int32[Array, "..."]
) -> Bool[Array, "..."] | None:
    """Returns a mask of the pages that are in the cache; None without a cache."""
    cache = state.prefixes
    return None if cache is None else is_cached(cache, page_ids)


def start_on_cached_pages(
    state: EngineState, prefix_match: PrefixMatch, slot: Int32[Array, " head"]
) -> EngineState:
    """Starts admitted requests on their cached pages.

    `slot` is the first slot of each request; -1 if it was not admitted.
    """
    if (cache := state.prefixes) is None:
        return state
    ids = jnp.where((slot >= 0)[:, None], prefix_match.page_ids, NO_PAGE)
    state = recurrent_states.start_on_checkpoints(state, ids, slot)
    state = window_pages.start_on_windows(state, ids, slot)
    table = state.table
    s = state.sequences
    sequence = arrays.take(state.slots.sequence, slot, fill=-1)
    slots = state.slots
    fork = state.slots.fork
    assert fork is not None
    # A request that comes back from a preemption has fed these tokens before; they do
    # not count as cached.
    new = arrays.take(slots.num_fed, slot, fill=0) == 0
    num_given = arrays.put(fork.num_given, slot, prefix_match.num_tokens)
    slots = slots._replace(fork=fork._replace(num_given=num_given))
    return state._replace(
        prefixes=mark_used(cache, ids),
        pool=memory.share(state.pool, ids),
        table=Table(
            page_ids=arrays.put(table.page_ids, slot, ids),
            length=arrays.put(table.length, slot, prefix_match.num_tokens),
            ahead=table.ahead,
        ),
        sequences=s._replace(
            num_cached=arrays.put(
                s.num_cached,
                sequence,
                jnp.where(new, prefix_match.num_tokens, 0),
                "add",
            )
        ),
    ).with_slots(slots)


def evict_until_free(state: EngineState, wanted: Int32[Array, ""]) -> EngineState:
    """Evicts pages until `wanted` pages are free, or the cache has no idle pages."""
    if state.prefixes is None:
        return state
    missing = jnp.maximum(wanted - state.pool.num_free, 0)
    cache, pool, _ = memory.evict(state.prefixes, state.pool, missing)
    return state._replace(prefixes=cache, pool=pool)


def release_slots(
    state: EngineState, is_released: Bool[Array, " slots"], rule: Eviction | None
) -> EngineState:
    """Empties the page tables of slots; their cached pages stay in the cache."""
    rows = jnp.where(is_released[:, None], state.table.page_ids, NO_PAGE)
    pool, left = release_counted(state.pool, rows)
    cache = state.prefixes
    if cache is not None:
        releases = None
        if getattr(rule, "reads_releases", False):
            releases = _releases(state)
        cache = mark_idle(cache, rows, left, rule, releases)
    table = clear_slots(state.table, is_released)
    state = recurrent_states.release_states(state, is_released)
    state = window_pages.release_windows(state, is_released)
    return state._replace(pool=pool, table=table, prefixes=cache)


def _releases(state: EngineState) -> Releases:
    """Returns what a rule reads of the request of each slot."""
    s = state.sequences
    sequence = jnp.maximum(state.slots.sequence, 0)
    seconds, micros = state.ledger.clock
    none = jnp.zeros_like(sequence)
    return Releases(
        now_ms=none + seconds % CLOCK_SECONDS * 1000 + micros // 1000,
        session=s.attributes.session[sequence],
        priority=s.attributes.priority[sequence],
        num_pages=none,
    )


def insert_filled_pages(
    state: EngineState, before: Int32[Array, " slots"], config: EngineConfig
) -> EngineState:
    """Adds the pages filled in this step to the cache.

    Pages are added in columns: the first filled page of every slot, then the second.

    Args:
      state: the engine, with the page table advanced.
      before: length of each slot before the step.
      config: the engine's configuration.
    """
    if state.prefixes is None:
        return state
    s = state.sequences
    size = config.page_size
    sequence = state.slots.sequence
    use_prefix_cache = arrays.take(s.use_prefix_cache, sequence, fill=False)
    salt = arrays.take(s.salt, sequence, fill=0)
    first = before // size
    end = state.table.length // size
    if state.search is not None:
        group = arrays.take(s.group, sequence, fill=-1)
        beam = arrays.take(state.search.width, group, fill=0) > 0
        prompt = arrays.take(s.prompt_length, sequence, fill=0)
        end = jnp.where(beam, jnp.minimum(end, prompt // size), end)
    num_filled = jnp.where(use_prefix_cache, end - first, 0)
    with jax.named_scope("enter"):
        return arrays.update_if(
            jnp.any(num_filled > 0),
            functools.partial(_insert, config=config),
            state,
            first,
            num_filled,
            salt,
        )


def _insert(
    state: EngineState,
    first: Int32[Array, " slots"],
    num_filled: Int32[Array, " slots"],
    salt: UInt32[Array, " slots"],
    *,
    config: EngineConfig,
) -> EngineState:
    """Adds `num_filled` pages of each slot from its page `first` on."""
    assert state.prefixes is not None
    s = state.sequences
    size = config.page_size
    sequence = state.slots.sequence
    slot = jnp.arange(config.max_slots, dtype=jnp.int32)
    offset = jnp.arange(size, dtype=jnp.int32)[None, :]

    def column(
        index: Array, carry: tuple[PrefixCache, Pool, Array]
    ) -> tuple[PrefixCache, Pool, Array]:
        cache, pool, page_ids = carry
        place = jnp.where(index < num_filled, first + index, -1)
        page = arrays.take(page_ids, (slot, place), fill=NO_PAGE)
        parent = arrays.take(page_ids, (slot, place - 1), fill=NO_PAGE)
        at = (sequence[:, None], place[:, None] * size + offset)
        tokens = arrays.take(s.tokens, at, fill=0)
        fields = (page, parent, tokens, salt)
        cache, entered, cached_page = insert_unpinned(cache, *fields)
        other = (cached_page != NO_PAGE) & (cached_page != page)
        cached_page, page = (
            jnp.where(other, ids, NO_PAGE) for ids in (cached_page, page)
        )
        gained = jnp.concatenate([entered, cached_page])
        pool, _ = release_counted(pool, page, shared=gained)
        cache = mark_used(cache, cached_page)
        at = (slot, jnp.where(other, place, -1))
        return cache, pool, arrays.put(page_ids, at, cached_page)

    carry = (state.prefixes, state.pool, state.table.page_ids)
    cache, pool, page_ids = lax.fori_loop(0, jnp.max(num_filled), column, carry)
    table = state.table._replace(page_ids=page_ids)
    state = state._replace(prefixes=cache, pool=pool, table=table)
    return window_pages.attach_windows(state, first, num_filled)
