"""The cached pages that nobody uses, in the order in which they are evicted.

A tournament: in the first round stand the idle pages, in each later one the winners of
`FAN_OUT` neighbours, so whoever comes or goes changes one game a round. The next pages
to go are found from the last round downwards: all of them have won wherever fewer than
that many others stood before them. What an operation costs depends on the pages it is
asked about and on the logarithm of the pool, never on its size.

Pages go by rank, the lowest first; at equal ranks the deepest first, then the lowest
id. Ranks are compared modulo 2**32, so that a counter of time may wrap: those of idle
pages must lie within 2**31 of each other.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.memory.page_pool import NO_PAGE

FAN_OUT = 8
"""Neighbours that play one game."""
CHUNK = 16
"""Pages that are evicted at a time."""
REPLAY_CHUNK = 64
"""Pages whose games are played again at a time."""

_LOWEST = -(2**31)


class IdlePages(NamedTuple):
    """Who is idle, and who goes first."""

    rounds: tuple[Int32[Array, " _"], ...]
    """Page ids, `NO_PAGE` where none: first all pages, each in its own place while it
    is idle; then the winners of the round before, down to `FAN_OUT` or fewer."""
    rank: Int32[Array, " pages"]
    """Pages of lower rank go first. Never below the ranks of the pages after it."""
    ranked: Bool[Array, " pages"]
    """Pages that have a rank: they, or pages after them, were idle since they entered
    the cache."""
    num: Int32[Array, ""]
    """How many are idle."""


def make_idle_pages(num_pages: int) -> IdlePages:
    """Makes the order of a pool in which no page is idle."""
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
    """Says which pages are idle; `NO_PAGE` is not."""
    return arrays.take(idle.rounds[0], page_ids, fill=NO_PAGE) != NO_PAGE


def insert(
    idle: IdlePages,
    depth: Int32[Array, " pages"],
    rows: Int32[Array, "rows columns"],
    joins: Bool[Array, "rows columns"],
    priority: Int32[Array, "rows columns"],
) -> IdlePages:
    """Enters pages. They, and all pages before them, rank as high as they at least.

    Args:
      idle: the order.
      depth: of each page of the pool.
      rows: pages of sequences, in token order, each cached after the one before it;
        `NO_PAGE` is ignored. A page may stand in several rows.
      joins: pages that become idle, none of which is; with each one all of its row
        that are behind it.
      priority: of these, equal where the page is the same.
    """
    ids = jnp.where(joins, rows, NO_PAGE).reshape(-1)
    rises = lax.cummax(joins.astype(jnp.int32), axis=1, reverse=True) > 0
    rows = jnp.where(rises, rows, NO_PAGE)
    ranked = arrays.take(idle.ranked, rows, fill=False)
    rank = _raised(idle, rows, ranked, joins, priority)
    new = jnp.where(ranked, NO_PAGE, rows)
    first, won = _distinct(idle.rounds[0], ids)
    won = jnp.where(won, ids, NO_PAGE)
    idle = idle._replace(
        rounds=(arrays.put(first, won, won, "set"), *idle.rounds[1:]),
        rank=rank,
        ranked=arrays.put(idle.ranked, new, True, "set"),
        num=idle.num + jnp.sum(won != NO_PAGE, dtype=jnp.int32),
    )
    return _play_again(idle, depth, won)


def remove(
    idle: IdlePages, depth: Int32[Array, " pages"], page_ids: Int32[Array, "..."]
) -> IdlePages:
    """Takes out those of the pages, named any number of times, that are idle.

    `depth` is that of each page of the pool; `NO_PAGE` is ignored.
    """
    ids = page_ids.reshape(-1)
    ids = jnp.where(is_idle(idle, ids), ids, NO_PAGE)
    first = idle.rounds[0]
    if ids.shape[0] > arrays.MAX_PAIRWISE:
        first = arrays.put(first, ids, NO_PAGE, "set")
    first, won = _distinct(first, ids)
    won = jnp.where(won, ids, NO_PAGE)
    idle = idle._replace(
        rounds=(arrays.put(first, won, NO_PAGE, "set"), *idle.rounds[1:]),
        num=idle.num - jnp.sum(won != NO_PAGE, dtype=jnp.int32),
    )
    return _play_again(idle, depth, won)


def eviction_candidates(
    idle: IdlePages, depth: Int32[Array, " pages"]
) -> Int32[Array, " chunk"]:
    """Finds the first `CHUNK` pages, in order; `NO_PAGE` beyond the last."""
    *_, last = idle.rounds
    base = arrays.take(idle.rank, jnp.max(last), fill=0)
    every = jnp.arange(CHUNK, dtype=jnp.int32)
    page, places = last, jnp.arange(last.shape[0], dtype=jnp.int32)
    for entrants in reversed(idle.rounds):
        if entrants is not last:
            places = _games(places).reshape(-1)
        page = arrays.take(entrants, places, fill=NO_PAGE)
        rank = arrays.take(idle.rank, page, fill=0) - base
        level = arrays.take(depth, page, fill=0)
        keys = (page == NO_PAGE, rank, -level, page, places)
        _, _, _, page, places = lax.sort(keys, num_keys=4)
        page, places = (arrays.take(x, every, fill=NO_PAGE) for x in (page, places))
    return page


def rebuild(idle: IdlePages, depth: Int32[Array, " pages"]) -> IdlePages:
    """Plays all games. Looks at every page: for tests, and to change all ranks."""
    rounds = list(idle.rounds)
    for i, games in enumerate(rounds[1:]):
        every = jnp.arange(games.shape[0], dtype=jnp.int32)
        rounds[i + 1] = _winners(idle, depth, rounds[i], every)
    count = jnp.sum(rounds[0] != NO_PAGE, dtype=jnp.int32)
    return idle._replace(rounds=tuple(rounds), num=count)


def count_idle_faults(
    idle: IdlePages,
    depth: Int32[Array, " pages"],
    parent: Int32[Array, " pages"],
    expected: Bool[Array, " pages"],
) -> Int32[Array, ""]:
    """Counts faults of the order: 0 on a sound one.

    Idle are the pages that are expected to be, each in its place; every game was won by
    who goes first; no page goes before one after it; and all are counted. Looks at
    every page.
    """
    count = partial(jnp.sum, dtype=jnp.int32)
    page = jnp.arange(depth.shape[0], dtype=jnp.int32)
    first = jnp.where(expected, page, NO_PAGE)
    sound = rebuild(idle._replace(rounds=(first, *idle.rounds[1:])), depth)
    faults = jnp.abs(sound.num - idle.num)
    for ours, theirs in zip(idle.rounds, sound.rounds, strict=True):
        faults += count(ours != theirs)
    before = arrays.take(idle.rank, parent, fill=0) - idle.rank
    early = (parent != NO_PAGE) & (before < 0)
    return faults + count(expected & (early | ~idle.ranked))


def _raised(
    idle: IdlePages, rows: Array, ranked: Array, joins: Array, priority: Array
) -> Int32[Array, " pages"]:
    """Ranks after pages with priorities have come, and others before them risen."""
    base = priority.reshape(-1)[jnp.argmax(joins)]
    new = jnp.where(joins, priority - base, _LOWEST)
    new = lax.cummax(new, axis=1, reverse=True)
    old = jnp.where(ranked, arrays.take(idle.rank, rows, fill=0) - base, _LOWEST)
    new = jnp.maximum(new, old)
    # A page may stand in several rows: the highest rank wins, and is written back. Each
    # write hangs on what was read before, or XLA would copy the ranks.
    rank = arrays.put(idle.rank, rows, old, "set")
    rank = arrays.put(rank, rows, new, "max")
    won = arrays.take(rank, rows, fill=0) == new
    return arrays.put(rank, jnp.where(won, rows, NO_PAGE), new + base, "set")


def _distinct(places: Array, ids: Array) -> tuple[Array, Array]:
    """Marks one place of each page in a list; `places` of them, all -1, is scratch.

    Of few none is needed.
    """
    if ids.shape[0] <= arrays.MAX_PAIRWISE:
        return places, arrays.mark_last_occurrences(ids)
    bid = jnp.arange(ids.shape[0], dtype=jnp.int32)
    places = arrays.put(places, ids, bid, "max")
    return places, (ids != NO_PAGE) & (arrays.take(places, ids, fill=-1) == bid)


def _play_again(idle: IdlePages, depth: Array, ids: Array) -> IdlePages:
    """Plays the games again in which these pages would stand, where they win."""

    def play(place: Array, rounds: tuple[Array, ...]) -> tuple[Array, ...]:
        played = [rounds[0]]
        for winners in rounds[1:]:
            place = place // FAN_OUT  # of NO_PAGE: itself
            new = _winners(idle, depth, played[-1], place)
            played.append(arrays.put(winners, place, new, "set"))
        return tuple(played)

    if ids.shape[0] <= REPLAY_CHUNK:
        return idle._replace(rounds=play(ids, idle.rounds))
    ids = arrays.packed(ids)
    num = jnp.sum(ids != NO_PAGE, dtype=jnp.int32)
    every = jnp.arange(REPLAY_CHUNK, dtype=jnp.int32)

    def some(i: Array, rounds: tuple[Array, ...]) -> tuple[Array, ...]:
        return play(arrays.take(ids, i * REPLAY_CHUNK + every, fill=NO_PAGE), rounds)

    trips = -(-num // REPLAY_CHUNK)
    return idle._replace(rounds=lax.fori_loop(0, trips, some, idle.rounds))


def _winners(idle: IdlePages, depth: Array, entrants: Array, place: Array) -> Array:
    """Who wins each of some games, `NO_PAGE` where nobody plays."""
    page = arrays.take(entrants, _games(place), fill=NO_PAGE)
    plays = page != NO_PAGE
    base = arrays.take(idle.rank, jnp.max(page), fill=0)
    rank = arrays.take(idle.rank, page, fill=0) - base
    lowest = jnp.min(jnp.where(plays, rank, -(_LOWEST + 1)), axis=1, keepdims=True)
    # Lower ids stand further left, and of equals `argmax` takes the first.
    level = jnp.where(plays & (rank == lowest), arrays.take(depth, page, fill=0), -1)
    winner = jnp.argmax(level, axis=1, keepdims=True)
    return jnp.take_along_axis(page, winner, axis=1)[:, 0]


def _games(place: Array) -> Array:
    """The places of those who play for each place; below 0 for a place below 0."""
    return place[:, None] * FAN_OUT + jnp.arange(FAN_OUT, dtype=jnp.int32)[None, :]
