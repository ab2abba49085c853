"""Eviction from the prefix cache: by a rule such as LRU, leaves before parents.

A page is idle while no sequence uses it; only idle pages are evicted. The rule ranks a
page when its last sequence releases it. `mark_idle` and `mark_used` maintain the order
of the idle pages (`idle_pages`), and `evict` takes the first pages of that order, so no
search is needed.

A page is never evicted before its children, for any rule: a sequence that uses a page
uses all pages before it, so the pages after an idle page are idle; the rank of a page
is at least that of every page after it; and at equal ranks the deeper page is first.
"""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxkv import arrays, validation
from jaxkv.memory import page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.prefixes import idle_pages, prefix_cache
from jaxkv.memory.prefixes.idle_pages import EVICTION_CHUNK, IdlePages
from jaxkv.memory.prefixes.prefix_cache import PrefixCache

CLOCK_SECONDS = 500_000
"""Seconds after which the clock of `Releases` restarts, so that ms fit into 2^29."""


class Releases(NamedTuple):
    """Requests that release pages, for rules that read them."""

    now_ms: Int32[Array, "..."]
    """Clock in ms, less than 2^29."""
    session: Int32[Array, "..."]
    """`RequestAttributes.session` of the request."""
    priority: Int32[Array, "..."]
    """`RequestAttributes.priority` of the request."""
    num_pages: Int32[Array, "..."]
    """Full pages that its sequence releases."""


class Uses(NamedTuple):
    """Usage statistics of cached pages for a rule. Ticks count modulo 2**32."""

    entered: Int32[Array, "..."]
    """Tick of entry into the cache."""
    last_used: Int32[Array, "..."]
    """Tick of the last release by a sequence, which is the current tick."""
    num_uses: Int32[Array, "..."]
    """Number of sequences that have used the page since it entered, including the one
    that filled it; forked sequences of one request count once."""
    depth: Int32[Array, "..."]
    """Number of pages before it."""
    releases: Releases | None = None
    """Requests that release the pages, of a shape that broadcasts to the other fields;
    None unless the rule has `reads_releases`."""


@runtime_checkable
class Eviction(Protocol):
    """A rule of eviction: a NamedTuple, as an `interface.Policy` is.

    An engine keeps one rule: existing ranks are not recomputed until pages are used
    again.
    """

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Ranks pages that become idle; the lowest rank is evicted first.

        The rank of a page is raised to the highest rank of the pages after it. Ranks
        are compared modulo 2**32; those of idle pages must be within 2**31.
        """
        ...


class LRU(NamedTuple):
    """Eviction of the least recently used page first."""

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Returns the tick of the last use."""
        return uses.last_used


class FIFO(NamedTuple):
    """First in, first out; the entry of a later page of the prefix counts as well."""

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Returns the tick of entry."""
        return uses.entered


class LFU(NamedTuple):
    """Eviction of the least frequently used page first, counted while cached."""

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Returns the number of uses."""
        return uses.num_uses


MAX_SESSION = (1 << 16) - 1
"""Session from which on all count as equal in `LinearEviction`."""
MAX_RATE_MS = 10_000
"""Largest absolute value of a rate of `LinearEviction`."""


class LinearEviction(NamedTuple):
    """Eviction by a linear score of the request that released the pages.

    The rank is `recency now_ms - session_ms session + priority_ms priority + page_ms
    num_pages`, and the lowest is evicted first. With a recency of 1 and no rates it is
    LRU by time; with `session_ms` alone, prefixes of the youngest session are evicted
    first.
    """

    recency: Int32[Array, ""]
    """Weight of the time of release, in hundredths, in [0, 100]."""
    session_ms: Int32[Array, ""]
    """Decrease of the rank with each session number, in ms."""
    priority_ms: Int32[Array, ""]
    """Increase of the rank with each unit of the request's priority, in ms."""
    page_ms: Int32[Array, ""]
    """Increase of the rank with each page of the prefix, in ms."""

    reads_releases = True

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Returns the linear score in ms."""
        assert uses.releases is not None
        r = uses.releases
        session = jnp.clip(r.session, 0, MAX_SESSION)
        rank = r.now_ms // 100 * self.recency - self.session_ms * session
        rank += self.priority_ms * r.priority + self.page_ms * r.num_pages
        rank = jnp.clip(rank, -(1 << 30) + 1, (1 << 30) - 1)
        return jnp.broadcast_to(rank, uses.last_used.shape)


_RATES_MS = f"[-{MAX_RATE_MS}, {MAX_RATE_MS}]"


@validation.checks_numbers(
    recency="[0, 1]", session_ms=_RATES_MS, priority_ms=_RATES_MS, page_ms=_RATES_MS
)
def linear_eviction(
    *,
    recency: int | float = 1.0,
    session_ms: int | float = 0,
    priority_ms: int | float = 0,
    page_ms: int | float = 0,
) -> LinearEviction:
    """Makes a `LinearEviction`; the default is LRU by time. Rates are rounded.

    Args:
      recency: weight of the time of the last release, in [0, 1], in hundredths.
      session_ms: decrease of the rank with each session number.
      priority_ms: increase of the rank with each unit of the request's priority.
      page_ms: increase of the rank with each page of the prefix.

    Raises:
      ValueError: a value is out of its range.
    """
    numbers = 100 * recency, session_ms, priority_ms, page_ms
    return LinearEviction(*(jnp.asarray(round(x), jnp.int32) for x in numbers))


def mark_idle(
    cache: PrefixCache,
    rows: Int32[Array, "rows columns"],
    left: Int32[Array, "rows columns"],
    rule: Eviction | None = None,
    releases: Releases | None = None,
) -> PrefixCache:
    """Records that sequences have released their pages, all of one call at one tick.

    Pages without remaining users become idle, ranked by the rule.

    Args:
      cache: the prefix cache.
      rows: all pages of each such sequence, in token order, cached or not; `NO_PAGE` is
        ignored.
      left: remaining uses of each page, including its pin, see
        `page_pool.release_counted`.
      rule: the eviction rule; None means `LRU()`.
      releases: the request of each row, if the rule reads them; its `num_pages` are
        counted here.

    Raises:
      ValueError: the rule's ranks are not int32.
    """
    rule = LRU() if rule is None else rule
    rows = jnp.where(prefix_cache.is_cached(cache, rows), rows, NO_PAGE)
    tick = cache.tick + 1
    if releases is not None:
        num_pages = jnp.sum(rows != NO_PAGE, axis=1, dtype=jnp.int32)
        releases = releases._replace(num_pages=num_pages)
        releases = Releases(*(x[:, None] for x in releases))

    def note(_: Array, carry: tuple[Array, IdlePages]) -> tuple[Array, IdlePages]:
        last_used, idle = carry
        now = jnp.broadcast_to(tick, rows.shape)
        uses = Uses(
            entered=prefix_cache.entry_tick(cache, rows),
            last_used=now,
            num_uses=arrays.take(cache.num_uses, rows, fill=0),
            depth=arrays.take(cache.depth, rows, fill=0),
            releases=releases,
        )
        joins = (left == 1) & (rows != NO_PAGE)
        priority = _priority(rule, uses)
        idle = idle_pages.insert_idle(idle, cache.depth, rows, joins, priority)
        return arrays.put(last_used, rows, now, "set"), idle

    trips = jnp.any(rows != NO_PAGE).astype(jnp.int32)
    carry = (cache.last_used, cache.idle)
    last_used, idle = lax.fori_loop(0, trips, note, carry)
    return cache._replace(last_used=last_used, idle=idle, tick=tick)


def mark_used(cache: PrefixCache, page_ids: Int32[Array, "..."]) -> PrefixCache:
    """Records that sequences have started to use cached pages, which the caller shares.

    A page is repeated for every sequence that uses it, together with all pages before
    it in this call or an earlier one; `NO_PAGE` is ignored. The pages are no longer
    idle.
    """

    def note(_: Array, carry: tuple[Array, IdlePages]) -> tuple[Array, IdlePages]:
        num_uses, idle = carry
        num_uses = arrays.put(num_uses, page_ids, 1, "add")
        return num_uses, idle_pages.remove(idle, cache.depth, page_ids)

    trips = jnp.any(page_ids != NO_PAGE).astype(jnp.int32)
    carry = (cache.num_uses, cache.idle)
    num_uses, idle = lax.fori_loop(0, trips, note, carry)
    return cache._replace(num_uses=num_uses, idle=idle)


def evict(
    cache: PrefixCache, pool: Pool, num: Int32[Array, ""]
) -> tuple[PrefixCache, Pool, Int32[Array, ""]]:
    """Evicts `num` idle pages, or all if there are fewer, lowest rank first.

    At equal ranks the deepest pages are first, then the lowest ids. They become free in
    this order. The cost is that of the evicted pages, and zero if `num` is 0.

    Returns:
      The new cache and pool, and the number of pages that have become free.
    """
    num = jnp.minimum(num, cache.idle.num)

    def evict_chunk(
        num: Array, i: Array, carry: tuple[Array, Array, IdlePages, Pool]
    ) -> tuple[Array, Array, IdlePages, Pool]:
        buckets, depth, idle, pool = carry
        ids = idle_pages.eviction_candidates(idle, depth)
        every = jnp.arange(EVICTION_CHUNK, dtype=jnp.int32)
        ids = jnp.where(i * EVICTION_CHUNK + every < num, ids, NO_PAGE)
        bucket = prefix_cache.bucket_of(cache, prefix_cache.hash_of(cache, ids))
        entries = arrays.take(buckets, bucket, fill=NO_PAGE)
        is_match = (entries == ids[:, None]) & (ids[:, None] != NO_PAGE)
        bucket_way = prefix_cache.way_of(is_match)
        depth = arrays.put(depth, ids, NO_PAGE, "set")
        return (
            arrays.put(buckets, (bucket, bucket_way), NO_PAGE, "set"),
            depth,
            idle_pages.remove(idle, depth, ids),
            page_pool.release(pool, ids),
        )

    def all_of_them(
        carry: tuple[Array, Array, IdlePages, Pool], num: Array
    ) -> tuple[Array, Array, IdlePages, Pool]:
        return lax.fori_loop(
            0, -(-num // EVICTION_CHUNK), functools.partial(evict_chunk, num), carry
        )

    carry = (cache.buckets, cache.depth, cache.idle, pool)
    buckets, depth, idle, pool = arrays.update_if(num > 0, all_of_them, carry, num)
    cache = cache._replace(
        buckets=buckets, depth=depth, idle=idle, num_pinned=cache.num_pinned - num
    )
    return cache, pool, num


def rerank(cache: PrefixCache, priority: Int32[Array, " pages"]) -> PrefixCache:
    """Replaces all ranks by those of another eviction rule. Reads every page.

    Priorities of pages that are not cached are ignored. The rank of a page is raised to
    the highest priority of the pages after it.
    """
    base = priority[jnp.argmax(cache.pinned)]
    lowest = jnp.iinfo(jnp.int32).min
    rank = jnp.where(cache.pinned, priority - base, lowest)
    parent = jnp.where(cache.pinned, cache.parent, NO_PAGE)

    # Ranks propagate to parents, grandparents and so on in doubling strides.
    def below(carry: tuple[Array, Array]) -> Array:
        rank, _ = carry
        return jnp.any((parent != NO_PAGE) & (arrays.take(rank, parent, fill=0) < rank))

    def pass_on(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rank, ancestor = carry
        further = arrays.take(ancestor, ancestor, fill=NO_PAGE)
        return arrays.put(rank, ancestor, rank, "max"), further

    rank, _ = lax.while_loop(below, pass_on, (rank, parent))
    ranked = cache.idle.ranked | cache.pinned
    idle = cache.idle._replace(rank=rank + base, ranked=ranked)
    return cache._replace(idle=idle_pages.rebuild(idle, cache.depth))


def _priority(rule: Eviction, uses: Uses) -> Array:
    """Returns the rule's ranks; raises a ValueError unless they are int32."""
    priorities: Any = rule.priority(uses)
    kind = getattr(priorities, "dtype", type(priorities).__name__)
    if kind != jnp.int32:
        raise ValueError(f"{type(rule).__name__} ranks pages by {kind}, not by int32")
    return jnp.broadcast_to(priorities, uses.depth.shape)
