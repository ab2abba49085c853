"""Counted pages: token places that sequences hold in a simulation, without page ids.

The prefix cache has the prefixes of chains of requests: each prompt of a chain starts
with the prompt and the answer of the request before it, so the pages of a chain in the
cache are the first pages of its last request. Pages of requests that do not run are
idle, and are evicted when pages are needed: the chain of the lowest rank first, the
last page of a chain first. Chains share no pages with each other.

Sequences of one request share the pages of their common tokens, see `ledger.Fork`. The
last of these pages may be partial, and is shared until a sequence writes to it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.ledger import NO_SEQUENCE, Groups, Slots, is_occupied, is_running
from jaxkv.memory import (
    CLOCK_SECONDS,
    LRU,
    Eviction,
    LinearEviction,
    Releases,
    Uses,
    eviction_due,
    first_window_page,
    pages_for,
)
from jaxkv.scheduling import RequestAttributes
from jaxkv.workloads import Workload


class CountedPages(NamedTuple):
    """Token places of the slots."""

    length: Int32[Array, "*n"]
    """Tokens whose K and V are written."""
    places: Int32[Array, "*n"]
    """Token places held: `length`, and those reserved ahead."""
    block: Int32[Array, "*n"] | None
    """First leaf of the contiguous block; None without a contiguous reservation."""
    evicted: Int32[Array, "*n"] | None = None
    """Tokens evicted from the cache; None without KV eviction."""

    @property
    def position(self) -> Int32[Array, "*n"]:
        """Tokens fed, the evicted ones included."""
        return self.length if self.evicted is None else self.length + self.evicted


class MemoryBreakdown(NamedTuple):
    """Token places of the pages in use, by their use.

    All remaining places are external: free, or beyond the reserved places of a
    contiguous block.
    """

    tokens: Int32[Array, ""]
    """Places with K and V of running sequences; shared places count once."""
    reserved: Int32[Array, ""]
    """Empty places that will be written before the sequence ends."""
    internal: Int32[Array, ""]
    """Places that stay empty (internal fragmentation)."""


def num_owned(
    slots: Slots,
    length: Int32[Array, " slots"],
    group: Groups | None,
    places: Int32[Array, " slots"],
    page_size: Int32[Array, ""],
) -> tuple[Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Counts the pages of `places` that each sequence accounts for.

    A page that a group shares counts once: a full page for the first sequence of the
    group, a partial page for the first of those that have not written since the fork.

    Returns:
      The counts, and the pages of each sequence that earlier ones account for.
    """
    pages = pages_for(places, page_size=page_size)
    if slots.fork is None or group is None:
        return pages, jnp.zeros_like(pages)
    shares = _shares(slots)
    joint = _is_joint(slots, length, page_size)
    full = jnp.where(shares & ~group.is_first, slots.fork.num_common // page_size, 0)
    num_shared = full + (joint & (group.before(joint) > 0)).astype(jnp.int32)
    return pages - num_shared, num_shared


def evict_counted(
    pages: CountedPages,
    runs: Bool[Array, " slots"],
    prompt: Int32[Array, " slots"],
    budget: Int32[Array, ""],
    limit: Int32[Array, ""],
) -> CountedPages:
    """Evicts tokens of running slots where the engine does, and releases places.

    Args:
      pages: token places of the slots.
      runs: slots whose sequences go on.
      prompt: tokens of their prompts.
      budget: tokens that stay.
      limit: tokens in the cache at which tokens of an answer are evicted.
    """
    after_prompt, in_answer = eviction_due(
        pages.length, pages.position, prompt, budget, limit
    )
    is_due = (after_prompt | in_answer) & runs
    num = jnp.where(is_due, pages.length - budget, 0)
    assert pages.evicted is not None
    return pages._replace(
        length=pages.length - num,
        places=jnp.where(is_due, budget, pages.places),
        evicted=pages.evicted + num,
    )


def num_copies(
    slots: Slots,
    length: Int32[Array, " slots"],
    group: Groups | None,
    wants: Int32[Array, " slots"],
    page_size: Int32[Array, ""],
) -> Int32[Array, " slots"]:
    """Counts the pages that each sequence copies before it writes `wants` tokens.

    The count is 0 or 1. Of the sequences that share a page, the last one to write needs
    no copy, see `page_table.needs_copy`.
    """
    if group is None:
        return jnp.zeros_like(wants)
    joint = _is_joint(slots, length, page_size)
    writes = joint & (wants > 0)
    owners = group.total(joint.astype(jnp.int32))
    return (writes & (group.before(writes) < owners - 1)).astype(jnp.int32)


def num_window_pages(
    slots: Slots,
    length: Int32[Array, " slots"],
    group: Groups | None,
    window: Int32[Array, ""],
    page_size: Int32[Array, ""],
) -> Int32[Array, ""]:
    """Counts the pages of layers with a window that return behind it.

    These are the pages of written tokens that the next token of each sequence reads.
    The common pages of a group count once, from the first that any sequence reads.
    """
    first = first_window_page(length, window=window, page_size=page_size)
    num = pages_for(length, page_size=page_size) - first
    if slots.fork is None or group is None:
        return jnp.sum(jnp.where(is_occupied(slots), num, 0), dtype=jnp.int32)
    common = jnp.where(_shares(slots), slots.fork.num_common // page_size, 0)
    common = jnp.where(is_occupied(slots), jnp.maximum(common - first, 0), 0)
    joint = _is_joint(slots, length, page_size)
    joint &= group.before(joint) > 0
    num_own = jnp.where(is_occupied(slots), num - common - joint.astype(jnp.int32), 0)
    shared = jnp.where(
        group.is_first, arrays.reduce_groups(common, group.first, "max"), 0
    )
    return jnp.sum(num_own + shared, dtype=jnp.int32)


def break_down(
    slots: Slots,
    pages: CountedPages,
    group: Groups | None,
    limit: Int32[Array, " slots"],
    page_size: Int32[Array, ""],
    num_reserved: Int32[Array, " slots"] | None = None,
) -> tuple[MemoryBreakdown, Int32[Array, ""]]:
    """Divides the token places of all pages in use by their use.

    Args:
      slots: the running batch.
      pages: token places of the slots.
      group: groups of the slots.
      limit: length of prompt plus answer; the last token is never written.
      page_size: tokens per page.
      num_reserved: places reserved for each sequence, if its block may be larger; else
        None.

    Returns:
      The places, and the number of pages saved by sharing.
    """
    owned, num_shared = num_owned(slots, pages.length, group, pages.places, page_size)
    runs = is_running(slots)
    before = num_shared * page_size
    num_places = jnp.where(slots.sequence >= 0, owned * page_size, 0)
    if num_reserved is not None:
        num_places = jnp.minimum(num_places, num_reserved)

    def within(tokens: Array) -> Array:
        """Counts the first `tokens` of each sequence on pages that it accounts for."""
        return jnp.where(runs, jnp.clip(tokens - before, 0, num_places), 0)

    tokens = within(pages.length)
    useful = within(jnp.maximum(limit - 1, pages.length))
    return MemoryBreakdown(
        tokens=jnp.sum(tokens, dtype=jnp.int32),
        reserved=jnp.sum(useful - tokens, dtype=jnp.int32),
        internal=jnp.sum(num_places - useful, dtype=jnp.int32),
    ), jnp.sum(jnp.where(slots.sequence >= 0, num_shared, 0), dtype=jnp.int32)


def _shares(slots: Slots) -> Bool[Array, " slots"]:
    """Returns the sequences that were forked or forked from."""
    fork = slots.fork
    assert fork is not None
    return (fork.num_common > 0) & ~fork.reads & ~fork.waits


def _is_joint(
    slots: Slots, length: Int32[Array, " slots"], page_size: Int32[Array, ""]
) -> Bool[Array, " slots"]:
    """Returns the sequences that share a partial last page.

    These are the ones that have not written since the fork.
    """
    fork = slots.fork
    assert fork is not None
    shares = _shares(slots) & (length == fork.num_common)
    return shares & (fork.num_common % page_size > 0)


_NO_RANK = 2**31 - 1


class PrefixChains(NamedTuple):
    """Cached pages of each chain that no running request uses."""

    idle: Int32[Array, " chains"]
    """Idle pages: the first ones of the chain."""
    rank: Int32[Array, " chains"]
    """Eviction rank, lowest first."""
    tick: Int32[Array, ""]
    """Steps so far, of which a rule sees two each."""


def check_eviction(eviction: Eviction | None) -> None:
    """Raises a ValueError for a rule that ranks pages of one chain differently."""
    if not isinstance(eviction, LRU | LinearEviction | None):
        raise ValueError(
            f"eviction={type(eviction).__name__} must be LRU or LinearEviction in a "
            "simulation"
        )


def init_chains(workload: Workload) -> PrefixChains | None:
    """Makes an empty cache; None if the workload has no chains."""
    if (chains := workload.chains) is None:
        return None
    none = jnp.zeros(chains.first.shape, jnp.int32)
    return PrefixChains(none, none, jnp.zeros((), jnp.int32))


def match_chains(
    cache: PrefixChains,
    workload: Workload,
    request: Int32[Array, " head"],
    num_tokens: Int32[Array, " head"],
    slots: Slots,
    page_size: Int32[Array, ""],
) -> Int32[Array, " head"]:
    """Returns the cached tokens of waiting requests; at least one token is fed.

    Without an empty slot no request is admitted, and the engine does not look.
    """
    assert workload.chains is not None
    chain = arrays.take(workload.chains.index, request, fill=NO_SEQUENCE)
    pages = arrays.take(cache.idle, chain, fill=0)
    pages = jnp.minimum(pages, jnp.maximum(num_tokens - 1, 0) // page_size)
    return jnp.where(jnp.any(~is_occupied(slots)), pages * page_size, 0)


def use_chains(
    cache: PrefixChains,
    workload: Workload,
    request: Int32[Array, " head"],
    num_pages: Int32[Array, " head"],
) -> PrefixChains:
    """Removes pages of admitted requests from the idle ones."""
    assert workload.chains is not None
    chain = arrays.take(workload.chains.index, request, fill=NO_SEQUENCE)
    return cache._replace(idle=arrays.put(cache.idle, chain, -num_pages, "add"))


def release_chains(
    cache: PrefixChains,
    workload: Workload,
    request: Int32[Array, " slots"],
    is_released: Bool[Array, " slots"],
    num_pages: Int32[Array, " slots"],
    *,
    now: Int32[Array, " 2"],
    eviction: Eviction | None,
) -> PrefixChains:
    """Adds the full pages of released slots to the idle ones, ranked by the rule."""
    assert workload.chains is not None
    rule = LRU() if eviction is None else eviction
    tick = cache.tick + 1
    row = jnp.maximum(request, 0)
    none = jnp.zeros_like(row)
    now_ms = now[0] % CLOCK_SECONDS * 1000 + now[1] // 1000
    attributes = workload.attributes or RequestAttributes()

    def column(values: Array | int) -> Int32[Array, " slots"]:
        values = jnp.broadcast_to(values, workload.prompt.shape)
        return values.astype(jnp.int32)[row]

    uses = Uses(
        entered=none,
        last_used=none + tick,
        num_uses=none,
        depth=none,
        releases=Releases(
            now_ms=none + now_ms,
            session=column(attributes.session),
            priority=column(attributes.priority),
            num_pages=num_pages,
        ),
    )
    rank = rule.priority(uses)
    chain = workload.chains.index[row]
    chain = jnp.where(is_released & (num_pages > 0), chain, NO_SEQUENCE)
    return PrefixChains(
        idle=arrays.put(cache.idle, chain, num_pages, "set"),
        rank=arrays.put(cache.rank, chain, rank, "set"),
        tick=tick,
    )


def evict_chains(cache: PrefixChains, num: Int32[Array, ""]) -> PrefixChains:
    """Evicts `num` idle pages, or all if there are fewer.

    Of chains with equal ranks, the one with most idle pages loses its last page first.
    """

    def goes_on(carry: tuple[Array, Array]) -> Array:
        idle, missing = carry
        return (missing > 0) & jnp.any(idle > 0)

    def evict_one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        idle, missing = carry
        lowest = jnp.min(jnp.where(idle > 0, cache.rank, _NO_RANK))
        depth = jnp.where((idle > 0) & (cache.rank == lowest), idle, 0)
        deepest = jnp.argmax(depth).astype(jnp.int32)
        is_first = jnp.arange(idle.size, dtype=jnp.int32) == deepest
        second = jnp.max(jnp.where(is_first, 0, depth))
        amount = jnp.maximum(depth[deepest] - second, 1)
        amount = jnp.minimum(amount, missing)
        return idle - jnp.where(is_first, amount, 0), missing - amount

    idle, _ = lax.while_loop(goes_on, evict_one, (cache.idle, num))
    return cache._replace(idle=idle)
