"""A prefix cache of counted pages: the prefixes of chains of requests.

Each prompt of a chain starts with the prompt and the answer of the request before it,
so the pages of a chain in the cache are the first pages of its last request. Pages of
requests that do not run are idle, and are evicted when pages are needed: the chain of
the lowest rank first, the last page of a chain first. Ranks are those of the engine's
rule of eviction. Chains share no pages with each other.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.ledger import NO_SEQUENCE, Slots, is_occupied
from jaxkv.memory import LRU, Eviction, LinearEviction, Releases, Uses
from jaxkv.scheduling import RequestAttributes
from jaxkv.workloads import Workload

_CLOCK_SECONDS = 500_000
"""Seconds after which the clock of `Releases` restarts, as in the engine."""
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
    now_ms = now[0] % _CLOCK_SECONDS * 1000 + now[1] // 1000
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
