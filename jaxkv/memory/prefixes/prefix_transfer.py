"""Transfer of cached prefixes between pools, such as from one worker to another.

A prefix is transferred as full pages from the first token on, with its tokens and salt.
The receiver looks it up in its prefix cache, keeps the pages that it has, and writes
the remaining ones into free or idle pages.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from jaxkv import arrays
from jaxkv.memory import kv_pages, page_pool
from jaxkv.memory.kv_pages import Pages
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.prefixes import prefix_cache, prefix_eviction
from jaxkv.memory.prefixes.prefix_cache import PrefixCache
from jaxkv.memory.prefixes.prefix_eviction import Eviction


class Prefix(NamedTuple):
    """The beginning of a sequence, in full pages."""

    tokens: Int32[Array, " max_length"]
    """Tokens of the sequence, arbitrary beyond `num_pages` pages."""
    num_pages: Int32[Array, ""]
    """Number of full pages; at least one token of `max_length` remains after them."""
    salt: UInt32[Array, ""]
    """Salt under which the pages are cached."""


def export_prefix(
    pages: Pages, cache: PrefixCache, prefix: Prefix
) -> tuple[Pages, Int32[Array, ""]]:
    """Copies the cached pages of a prefix, which stay cached.

    Returns:
      Pages for `max_length` tokens, in token order; and the number of them, from the
      first one on, that were cached.
    """
    ids = _match(cache, prefix)
    return kv_pages.gather_pages(pages, ids), _count(ids)


def import_prefix(
    pages: Pages,
    pool: Pool,
    cache: PrefixCache,
    prefix: Prefix,
    sent: Pages,
    rule: Eviction | None = None,
) -> tuple[Pages, Pool, PrefixCache, Int32[Array, ""]]:
    """Caches the pages of a prefix, as returned by `export_prefix`; they are idle.

    If free and idle pages are too few, the first pages of the prefix enter. Idle pages
    are evicted for them, in the order of their ranks.

    Returns:
      The new pages, pool and cache; and the number of pages of the prefix that are
      cached now.
    """
    ids = _match(cache, prefix)
    num_there = _count(ids)
    column = jnp.arange(len(ids), dtype=jnp.int32)
    # Used as by a sequence, so that eviction takes none of them.
    cache = prefix_eviction.mark_used(cache, ids)
    pool = page_pool.share(pool, ids)
    free = pool.num_free + cache.idle.num
    num_new = jnp.minimum(prefix.num_pages - num_there, free)
    missing = jnp.maximum(num_new - pool.num_free, 0)
    cache, pool, _ = prefix_eviction.evict(cache, pool, missing)
    pool, new, _ = page_pool.allocate(pool, num_new[None], max_pages=len(ids))
    end = num_there + num_new
    is_new = (column >= num_there) & (column < end)
    place = jnp.where(is_new, column - num_there, -1)
    ids = jnp.where(is_new, arrays.take(new[0], place, fill=NO_PAGE), ids)
    pages = kv_pages.scatter_pages(pages, jnp.where(is_new, ids, NO_PAGE), sent)
    cache, pool = _enter(cache, pool, prefix, ids, num_there, end)
    is_cached = prefix_cache.is_cached(cache, ids)
    pool, left = page_pool.release_counted(pool, ids[None])
    cache = prefix_eviction.mark_idle(cache, ids[None], left, rule)
    return pages, pool, cache, jnp.sum(is_cached, dtype=jnp.int32)


def _match(cache: PrefixCache, prefix: Prefix) -> Int32[Array, " pages_per_slot"]:
    """Returns the cached pages of a prefix."""
    num_tokens = prefix.num_pages * cache.page_size + 1
    return prefix_cache.match(
        cache,
        prefix.tokens[None],
        num_tokens[None],
        prefix.salt[None],
        jnp.ones(1, bool),
    )[0]


def _count(ids: Int32[Array, " n"]) -> Int32[Array, ""]:
    return jnp.sum(ids != NO_PAGE, dtype=jnp.int32)


def _enter(
    cache: PrefixCache,
    pool: Pool,
    prefix: Prefix,
    ids: Int32[Array, " n"],
    first: Int32[Array, ""],
    end: Int32[Array, ""],
) -> tuple[PrefixCache, Pool]:
    """Enters the pages in [first, end), one after another."""
    size = cache.page_size

    def one(index: Array, carry: tuple[PrefixCache, Pool]) -> tuple[PrefixCache, Pool]:
        page_id, before = (
            arrays.take(ids, place[None], fill=NO_PAGE) for place in (index, index - 1)
        )
        tokens = lax.dynamic_slice_in_dim(prefix.tokens, index * size, size)
        cache, pool, _ = prefix_cache.insert(
            *carry, page_id, before, tokens[None], prefix.salt[None]
        )
        return cache, pool

    return lax.fori_loop(first, end, one, (cache, pool))
