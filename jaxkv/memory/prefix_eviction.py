"""Eviction from the prefix cache: by a rule, leaves before parents.

A page is idle while no sequence uses it; only idle pages are evicted. What a rule says
of a page counts from the moment in which the last sequence lets go of it. So nothing is
looked for: `rest` and `use` keep the order of the idle pages (`jaxkv.idle_pages`), and
`evict` takes from its front.

No page stays without its parent, whatever the rule. Whoever uses a page uses all before
it, so what comes after an idle page is idle; a page never ranks below one after it; and
at equal ranks the deeper goes first. Hence its child stands before it in the order.
"""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxkv import arrays
from jaxkv.memory import idle_pages, page_pool, prefix_cache
from jaxkv.memory.idle_pages import CHUNK, IdlePages
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.prefix_cache import Prefixes


class Uses(NamedTuple):
    """What a rule may know of cached pages. Ticks count modulo 2**32."""

    entered: Int32[Array, "..."]
    """Tick at which each entered the cache."""
    last_used: Int32[Array, "..."]
    """Tick at which a sequence last let go of it: now."""
    num_uses: Int32[Array, "..."]
    """Sequences that have used it since it entered, the one that filled it included;
    those of one request that were forked count once."""
    depth: Int32[Array, "..."]
    """Pages before it in its sequences."""


@runtime_checkable
class Eviction(Protocol):
    """The rule of eviction. A NamedTuple, as a `interface.Policy` is.

    One rule goes with one engine: ranks that it gave stay until pages are used again.
    """

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Ranks pages that become idle: who has the lowest rank is evicted first.

        A page ranks at least as high as all pages that ever stood after it. Ranks are
        compared modulo 2**32, those of idle pages must lie within 2**31.
        """
        ...


class LRU(NamedTuple):
    """Least recently used first."""

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """The tick of the last use."""
        return uses.last_used


class FIFO(NamedTuple):
    """First in, first out; a page entered when it, or the last one after it, did."""

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """The tick of entry."""
        return uses.entered


class LFU(NamedTuple):
    """Least frequently used first, counted while a page is cached."""

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """The number of uses."""
        return uses.num_uses


def rest(
    cache: Prefixes,
    rows: Int32[Array, "rows columns"],
    left: Int32[Array, "rows columns"],
    rule: Eviction | None = None,
) -> Prefixes:
    """Notes that sequences have let go of their pages, all of one call at one tick.

    `rows` are all pages of each such sequence, in token order, cached or not, `NO_PAGE`
    ignored; `left` are the uses that each has left, its pin among them, see
    `page_pool.release_counted`. Those that nobody uses any more are idle, ranked by the
    rule; None means `LRU()`.

    Raises:
      ValueError: the rule ranks by something else than int32.
    """
    rule = LRU() if rule is None else rule
    rows = jnp.where(prefix_cache.is_cached(cache, rows), rows, NO_PAGE)
    tick = cache.tick + 1

    def note(_: Array, carry: tuple[Array, IdlePages]) -> tuple[Array, IdlePages]:
        last_used, idle = carry
        now = jnp.broadcast_to(tick, rows.shape)
        uses = Uses(
            entered=prefix_cache.entry_tick(cache, rows),
            last_used=now,
            num_uses=arrays.take(cache.num_uses, rows, fill=0),
            depth=arrays.take(cache.depth, rows, fill=0),
        )
        joins = (left == 1) & (rows != NO_PAGE)
        priority = _priority(rule, uses)
        idle = idle_pages.insert(idle, cache.depth, rows, joins, priority)
        return arrays.put(last_used, rows, now, "set"), idle

    trips = jnp.any(rows != NO_PAGE).astype(jnp.int32)
    carry = (cache.last_used, cache.idle)
    last_used, idle = lax.fori_loop(0, trips, note, carry)
    return cache._replace(last_used=last_used, idle=idle, tick=tick)


def use(cache: Prefixes, page_ids: Int32[Array, "..."]) -> Prefixes:
    """Notes that sequences have taken up cached pages, which the caller shares.

    Each stands as often as sequences took it up, and with each all before it, now or
    before; `NO_PAGE` is ignored. None of them is idle any more.
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
    cache: Prefixes, pool: Pool, num: Int32[Array, ""]
) -> tuple[Prefixes, Pool, Int32[Array, ""]]:
    """Evicts `num` idle pages, or all there are, those of the lowest rank first.

    At equal ranks the deepest go first, then the lowest id. They become free in this
    order. The cost is that of the pages evicted; nothing is looked at if `num` is 0.

    Returns:
      The new cache and pool, and how many pages have become free.
    """
    num = jnp.minimum(num, cache.idle.num)

    def some(
        num: Array, i: Array, carry: tuple[Array, Array, IdlePages, Pool]
    ) -> tuple[Array, Array, IdlePages, Pool]:
        buckets, depth, idle, pool = carry
        ids = idle_pages.eviction_candidates(idle, depth)
        every = jnp.arange(CHUNK, dtype=jnp.int32)
        ids = jnp.where(i * CHUNK + every < num, ids, NO_PAGE)
        bucket = prefix_cache.bucket_of(cache, prefix_cache.hash_of(cache, ids))
        entries = arrays.take(buckets, bucket, fill=NO_PAGE)
        found = (entries == ids[:, None]) & (ids[:, None] != NO_PAGE)
        way = prefix_cache.way_of(found)
        depth = arrays.put(depth, ids, NO_PAGE, "set")
        return (
            arrays.put(buckets, (bucket, way), NO_PAGE, "set"),
            depth,
            idle_pages.remove(idle, depth, ids),
            page_pool.release(pool, ids),
        )

    def all_of_them(carry: Any, num: Array) -> Any:
        return lax.fori_loop(0, -(-num // CHUNK), functools.partial(some, num), carry)

    carry = (cache.buckets, cache.depth, cache.idle, pool)
    buckets, depth, idle, pool = arrays.when(num > 0, all_of_them, carry, num)
    cache = cache._replace(
        buckets=buckets, depth=depth, idle=idle, num_pinned=cache.num_pinned - num
    )
    return cache, pool, num


def rerank(cache: Prefixes, priority: Int32[Array, " pages"]) -> Prefixes:
    """Ranks all pages anew, by the priority of another rule. Looks at every page.

    Priorities of pages that are not cached mean nothing. A page ranks at least as high
    as all that stand after it.
    """
    base = priority[jnp.argmax(cache.pinned)]
    lowest = jnp.iinfo(jnp.int32).min
    rank = jnp.where(cache.pinned, priority - base, lowest)
    parent = jnp.where(cache.pinned, cache.parent, NO_PAGE)

    # Ranks pass to parents, grandparents and on in doubling strides.
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
    """What the rule says; whatever has ranks of another kind is refused."""
    given: Any = rule.priority(uses)
    kind = getattr(given, "dtype", type(given).__name__)
    if kind != jnp.int32:
        raise ValueError(f"{type(rule).__name__} ranks pages by {kind}, not by int32")
    return jnp.broadcast_to(given, uses.depth.shape)
