"""Checkpoints: entries of another pool that belong to pages of the prefix cache.

Layers without K and V of every token have pools of their own, whose entries are states
of recurrent layers (`state_pool`) or pages of layers with a window (`window_pool`). An
entry that was written together with a cached page is its checkpoint: a request that
starts on the page continues from it. A checkpoint is valid while its page is cached,
which the tick of the page's entry shows, and until the pool writes to it again.
"""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.memory.page_pool import NO_PAGE
from jaxkv.memory.prefixes.prefix_cache import PrefixCache, entry_tick, is_cached


@runtime_checkable
class Checkpoints(Protocol):
    """The fields of a pool whose entries can be checkpoints."""

    @property
    def page(self) -> Int32[Array, " entries"]:
        """Cached page of each entry; `NO_PAGE` if it is no checkpoint."""
        ...

    @property
    def entered(self) -> Int32[Array, " entries"]:
        """Tick at which that page entered the cache."""
        ...

    @property
    def of_page(self) -> Int32[Array, " pages"]:
        """Checkpoint of each page, if its `page` is this one."""
        ...


def checkpointed(
    pool: Checkpoints, cache: PrefixCache | None
) -> Bool[Array, " entries"]:
    """Returns True for entries that are valid checkpoints."""
    if cache is None:
        return jnp.zeros(pool.page.shape, bool)
    entry = jnp.arange(pool.page.shape[0], dtype=jnp.int32)
    fresh = entry_tick(cache, pool.page) == pool.entered
    is_named = arrays.take(pool.of_page, pool.page, fill=arrays.NONE) == entry
    return is_cached(cache, pool.page) & fresh & is_named


def checkpoint_of(
    pool: Checkpoints, cache: PrefixCache, page_ids: Int32[Array, "*places"]
) -> Int32[Array, "*places"]:
    """Returns the checkpoint of each cached page, or `arrays.NONE`."""
    entry = arrays.take(pool.of_page, page_ids, fill=arrays.NONE)
    valid = arrays.take(checkpointed(pool, cache), entry, fill=False)
    valid &= arrays.take(pool.page, entry, fill=NO_PAGE) == page_ids
    return jnp.where(valid, entry, arrays.NONE)


def new_checkpoints(
    pool: Checkpoints,
    cache: PrefixCache,
    page_ids: Int32[Array, " n"],
    entries: Int32[Array, " n"],
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Returns the pages that get a checkpoint, and the entries that become one.

    Rows are skipped, with `NO_PAGE` and `arrays.NONE`, if they have no page or no
    entry, or a page that is not cached or has a checkpoint.
    """
    wanted = is_cached(cache, page_ids) & (entries != arrays.NONE)
    wanted &= checkpoint_of(pool, cache, page_ids) == arrays.NONE
    return (
        jnp.where(wanted, page_ids, NO_PAGE),
        jnp.where(wanted, entries, arrays.NONE),
    )
