"""Cached pages without a user, in the order of eviction: a tournament tree.

The first level holds the idle pages, and each node of a later level holds the winner of
`FAN_OUT` nodes below it, so inserting or removing a page updates one node per level.
The next pages to evict are found from the root downwards. An operation costs as much as
the pages of its arguments and the logarithm of the pool's size.

Pages are evicted by ascending rank; at equal ranks the deepest page is first, then the
lowest id. Ranks are compared modulo 2**32, so that a tick counter may wrap: ranks of
idle pages must be within 2**31 of each other.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.memory.page_pool import NO_PAGE

FAN_OUT = 8
"""Children of a node."""
EVICTION_CHUNK = 16
"""Pages that are evicted at a time."""
REPLAY_CHUNK = 64
"""Pages whose nodes in the tree are updated at a time."""

_NO_PRIORITY = -(2**31)


class IdlePages(NamedTuple):
    """The tournament tree and the ranks of the pages."""

    rounds: tuple[Int32[Array, " _"], ...]
    """Levels of the tree: page ids, or `NO_PAGE`. The first level has an entry for
    every page, its own id while it is idle; each later level has the winners of the
    level before, down to at most `FAN_OUT` nodes."""
    rank: Int32[Array, " pages"]
    """Eviction rank, lowest first; at least the rank of every page after it in a
    sequence."""
    ranked: Bool[Array, " pages"]
    """True for pages with a rank: the page, or a page after it, has been idle since it
    entered the cache."""
    num: Int32[Array, ""]
    """Number of idle pages."""


def make_idle_pages(num_pages: int) -> IdlePages:
    """Makes the tree of a pool without idle pages."""
    sizes = [num_pages]
    while sizes[-1] > FAN_OUT:
        sizes.append(-(-sizes[-1] // FAN_OUT))
    return IdlePages(
        rounds=tuple(jnp.full(size, NO_PAGE, jnp.int32) for size in sizes),
        rank=jnp.zeros(num_pages, jnp.int32),
        ranked=jnp.zeros(num_pages, bool),
        num=jnp.zeros((), jnp.int32),
    )


def is_idle(idle: IdlePages, page_ids: Int32[Array, "..."]) -> Bool[Array, "..."]:
    """Returns True for idle pages, False for `NO_PAGE`."""
    return arrays.take(idle.rounds[0], page_ids, fill=NO_PAGE) != NO_PAGE


def insert_idle(
    idle: IdlePages,
    depth: Int32[Array, " pages"],
    rows: Int32[Array, "rows columns"],
    joins: Bool[Array, "rows columns"],
    priority: Int32[Array, "rows columns"],
) -> IdlePages:
    """Inserts pages; the rank of each page before them rises to their priority.

    Args:
      idle: the tree.
      depth: depth of each page of the pool.
      rows: pages of sequences in token order, each cached after the page before it;
        `NO_PAGE` is ignored. A page may be in several rows.
      joins: True for pages that become idle, none of which is idle yet; each includes
        all pages after it in its row.
      priority: priority of each page that joins, equal for equal pages.
    """
    ids = jnp.where(joins, rows, NO_PAGE).reshape(-1)
    rises = lax.cummax(joins.astype(jnp.int32), axis=1, reverse=True) > 0
    rows = jnp.where(rises, rows, NO_PAGE)
    ranked = arrays.take(idle.ranked, rows, fill=False)
    rank = _raise_ranks(idle, rows, ranked, joins, priority)
    new = jnp.where(ranked, NO_PAGE, rows)
    first, won = _mark_distinct(idle.rounds[0], ids)
    won = jnp.where(won, ids, NO_PAGE)
    idle = idle._replace(
        rounds=(arrays.put(first, won, won, "set"), *idle.rounds[1:]),
        rank=rank,
        ranked=arrays.put(idle.ranked, new, True, "set"),
        num=idle.num + jnp.sum(won != NO_PAGE, dtype=jnp.int32),
    )
    return _update_ancestors(idle, depth, won)


def remove(
    idle: IdlePages, depth: Int32[Array, " pages"], page_ids: Int32[Array, "..."]
) -> IdlePages:
    """Removes the idle pages among `page_ids`, which may be repeated.

    `depth` is the depth of each page of the pool; `NO_PAGE` is ignored.
    """
    ids = page_ids.reshape(-1)
    ids = jnp.where(is_idle(idle, ids), ids, NO_PAGE)
    first = idle.rounds[0]
    if ids.shape[0] > arrays.MAX_PAIRWISE:
        first = arrays.put(first, ids, NO_PAGE, "set")
    first, won = _mark_distinct(first, ids)
    won = jnp.where(won, ids, NO_PAGE)
    idle = idle._replace(
        rounds=(arrays.put(first, won, NO_PAGE, "set"), *idle.rounds[1:]),
        num=idle.num - jnp.sum(won != NO_PAGE, dtype=jnp.int32),
    )
    return _update_ancestors(idle, depth, won)


def eviction_candidates(
    idle: IdlePages, depth: Int32[Array, " pages"]
) -> Int32[Array, " chunk"]:
    """Returns the first `EVICTION_CHUNK` pages to evict, padded with `NO_PAGE`."""
    *_, last = idle.rounds
    base = arrays.take(idle.rank, jnp.max(last), fill=0)
    every = jnp.arange(EVICTION_CHUNK, dtype=jnp.int32)
    page = last
    places = jnp.arange(last.shape[0], dtype=jnp.int32)
    for entrants in reversed(idle.rounds):
        if entrants is not last:
            places = _children(places).reshape(-1)
        page = arrays.take(entrants, places, fill=NO_PAGE)
        rank = arrays.take(idle.rank, page, fill=0) - base
        level = arrays.take(depth, page, fill=0)
        keys = (page == NO_PAGE, rank, -level, page, places)
        _, _, _, page, places = lax.sort(keys, num_keys=4)
        page, places = (arrays.take(x, every, fill=NO_PAGE) for x in (page, places))
    return page


def rebuild(idle: IdlePages, depth: Int32[Array, " pages"]) -> IdlePages:
    """Recomputes the whole tree, for tests and after all ranks have changed."""
    rounds = list(idle.rounds)
    for i, nodes in enumerate(rounds[1:]):
        every = jnp.arange(nodes.shape[0], dtype=jnp.int32)
        rounds[i + 1] = _winners(idle, depth, rounds[i], every)
    count = jnp.sum(rounds[0] != NO_PAGE, dtype=jnp.int32)
    return idle._replace(rounds=tuple(rounds), num=count)


def count_idle_faults(
    idle: IdlePages,
    depth: Int32[Array, " pages"],
    parent: Int32[Array, " pages"],
    expected: Bool[Array, " pages"],
) -> Int32[Array, ""]:
    """Counts the faults of the tree; 0 if it is sound. Reads every page.

    A fault is a page whose entry differs from `expected`, a node that is not the winner
    of its children, a page that ranks below a page after it, or a wrong count.
    """
    count = partial(jnp.sum, dtype=jnp.int32)
    page = jnp.arange(depth.shape[0], dtype=jnp.int32)
    first = jnp.where(expected, page, NO_PAGE)
    sound = rebuild(idle._replace(rounds=(first, *idle.rounds[1:])), depth)
    faults = jnp.abs(sound.num - idle.num)
    for actual, wanted in zip(idle.rounds, sound.rounds, strict=True):
        faults += count(actual != wanted)
    before = arrays.take(idle.rank, parent, fill=0) - idle.rank
    early = (parent != NO_PAGE) & (before < 0)
    return faults + count(expected & (early | ~idle.ranked))


def _raise_ranks(
    idle: IdlePages, rows: Array, ranked: Array, joins: Array, priority: Array
) -> Int32[Array, " pages"]:
    """Returns the ranks after pages have joined and pages before them have risen."""
    base = priority.reshape(-1)[jnp.argmax(joins)]
    new = jnp.where(joins, priority - base, _NO_PRIORITY)
    new = lax.cummax(new, axis=1, reverse=True)
    old = jnp.where(ranked, arrays.take(idle.rank, rows, fill=0) - base, _NO_PRIORITY)
    new = jnp.maximum(new, old)
    # A page may be in several rows: the highest rank wins and is written back. Each
    # write depends on the reads before it; otherwise XLA would copy the ranks.
    rank = arrays.put(idle.rank, rows, old, "set")
    rank = arrays.put(rank, rows, new, "max")
    won = arrays.take(rank, rows, fill=0) == new
    return arrays.put(rank, jnp.where(won, rows, NO_PAGE), new + base, "set")


def _mark_distinct(places: Array, ids: Array) -> tuple[Array, Array]:
    """Marks one occurrence of each page; `places`, all -1, is scratch memory.

    At most `MAX_PAIRWISE` pages need no scratch memory.
    """
    if ids.shape[0] <= arrays.MAX_PAIRWISE:
        return places, arrays.mark_last_occurrences(ids)
    bid = jnp.arange(ids.shape[0], dtype=jnp.int32)
    places = arrays.put(places, ids, bid, "max")
    return places, (ids != NO_PAGE) & (arrays.take(places, ids, fill=-1) == bid)


def _update_ancestors(idle: IdlePages, depth: Array, ids: Array) -> IdlePages:
    """Recomputes the nodes of the tree above the given pages."""

    def update(place: Array, rounds: tuple[Array, ...]) -> tuple[Array, ...]:
        updated = [rounds[0]]
        for winners in rounds[1:]:
            place = place // FAN_OUT  # NO_PAGE stays NO_PAGE
            new = _winners(idle, depth, updated[-1], place)
            updated.append(arrays.put(winners, place, new, "set"))
        return tuple(updated)

    if ids.shape[0] <= REPLAY_CHUNK:
        return idle._replace(rounds=update(ids, idle.rounds))
    ids = arrays.compact_ids(ids)
    num = jnp.sum(ids != NO_PAGE, dtype=jnp.int32)
    every = jnp.arange(REPLAY_CHUNK, dtype=jnp.int32)

    def update_chunk(i: Array, rounds: tuple[Array, ...]) -> tuple[Array, ...]:
        return update(arrays.take(ids, i * REPLAY_CHUNK + every, fill=NO_PAGE), rounds)

    trips = -(-num // REPLAY_CHUNK)
    return idle._replace(rounds=lax.fori_loop(0, trips, update_chunk, idle.rounds))


def _winners(idle: IdlePages, depth: Array, entrants: Array, place: Array) -> Array:
    """Returns the winners of some nodes' children; `NO_PAGE` without children."""
    page = arrays.take(entrants, _children(place), fill=NO_PAGE)
    is_page = page != NO_PAGE
    base = arrays.take(idle.rank, jnp.max(page), fill=0)
    rank = arrays.take(idle.rank, page, fill=0) - base
    lowest = jnp.min(
        jnp.where(is_page, rank, -(_NO_PRIORITY + 1)), axis=1, keepdims=True
    )
    # Children are in the order of ids, and `argmax` returns the first maximum.
    level = jnp.where(is_page & (rank == lowest), arrays.take(depth, page, fill=0), -1)
    winner = jnp.argmax(level, axis=1, keepdims=True)
    return jnp.take_along_axis(page, winner, axis=1)[:, 0]


def _children(place: Array) -> Array:
    """Returns the indices of each node's children; negative for a negative node."""
    return place[:, None] * FAN_OUT + jnp.arange(FAN_OUT, dtype=jnp.int32)[None, :]
