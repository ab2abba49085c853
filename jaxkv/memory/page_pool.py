"""The page pool: who uses which page, and which pages are free.

A pool is a value. Every operation takes one and returns the next, all shapes are
fixed, and what an operation costs depends on the pages it moves, never on the size
of the pool: free pages are kept on a stack, so that none has to be looked for.

Page ids carry a sentinel, `NO_PAGE`, wherever no page is meant; all indexing by them
goes through `arrays.put` and `arrays.take`, which leave it out.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.arrays import put, take

NO_PAGE = arrays.NONE
"""Stands in a table, or in a list of ids, where no page is mapped."""


class Pool(NamedTuple):
    """Reference counts of all pages, and the free ones ready to be handed out."""

    ref: Int32[Array, " pages"]
    """Uses of each page: places in tables plus pins of caches. 0 means free."""
    stack: Int32[Array, " pages"]
    """The first `num_free` entries are the free page ids, the next one to be taken
    last. The entries beyond mean nothing."""
    num_free: Int32[Array, ""]
    """Pages that are free."""


def make_pool(num_pages: int, order: Int32[Array, " pages"] | None = None) -> Pool:
    """Makes a pool whose pages are all free.

    They will be handed out in the order given, every page id once; None hands out the
    lowest ids first. `count_pool_faults` finds an `order` that is not a permutation.

    Raises:
      ValueError: `num_pages`, static, is below 1, or `order` has another length.
    """
    num_pages = validation.integer("num_pages", num_pages, low=1)
    if order is None:
        order = jnp.arange(num_pages, dtype=jnp.int32)
    if order.shape != (num_pages,):
        raise ValueError(f"{order.shape=} must be {(num_pages,)}")
    return Pool(
        ref=jnp.zeros(num_pages, jnp.int32),
        stack=jnp.flip(order),
        num_free=jnp.full((), num_pages, jnp.int32),
    )


def allocate(
    pool: Pool, want: Int32[Array, " n"], *, max_pages: int
) -> tuple[Pool, Int32[Array, "n {max_pages}"], Bool[Array, ""]]:
    """Takes free pages for every row, all or nothing: `want[row]`, in [0, max_pages].

    Row 0 is served first, and the page released last goes first, so equal inputs give
    equal page ids.

    Returns:
      The new pool, each page taken with a count of one; the page ids, `NO_PAGE` past
      `want[row]`; and whether there were enough. If not, or if a row's wish is out of
      range, the pool is unchanged bit for bit and every id is `NO_PAGE`.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.2.
    """
    place = jnp.arange(max_pages, dtype=jnp.int32)
    rank = jnp.broadcast_to(place[None, :], (want.shape[0], max_pages))
    return allocate_at(pool, want, rank, may=jnp.all(want <= max_pages))


def allocate_at(
    pool: Pool,
    want: Int32[Array, " n"],
    rank: Int32[Array, "n places"],
    *,
    may: Bool[Array, ""],
    back: Int32[Array, "..."] | None = None,
) -> tuple[Pool, Int32[Array, "n places"], Bool[Array, ""]]:
    """Takes free pages as `allocate` does, and puts each where it is to stand.

    `rank` says which of its row's pages each place gets, in [0, want[row]), every one
    of them once; what is out of this range gets `NO_PAGE`. `may` says whether anything
    may be taken at all. If there are enough pages, those in `back` lose a use each;
    somebody else must go on using them.
    """
    total = jnp.sum(want, dtype=jnp.int32)
    enough = may & jnp.all(want >= 0) & (total <= pool.num_free)
    # The k-th page asked for is the k-th from the top: equal ranks meet in one gather.
    start = jnp.cumsum(want, dtype=jnp.int32) - want
    asked = (rank >= 0) & (rank < want[:, None]) & enough
    depth = jnp.where(asked, pool.num_free - 1 - start[:, None] - rank, NO_PAGE)
    ids = take(pool.stack, depth, fill=NO_PAGE)
    num_free = pool.num_free - jnp.where(enough, total, 0)
    changed, uses = ids.reshape(-1), jnp.ones(ids.size, jnp.int32)
    if back is not None:
        back = jnp.where(enough, back, NO_PAGE).reshape(-1)
        changed = jnp.concatenate([changed, back])
        uses = jnp.concatenate([uses, jnp.full_like(back, -1)])
    ref = put(pool.ref, changed, uses, "add")
    return pool._replace(ref=ref, num_free=num_free), ids, enough


def share(pool: Pool, ids: Int32[Array, "..."]) -> Pool:
    """Adds one use to every page in `ids`, `NO_PAGE` ignored.

    An id that stands m times gains m uses. Sharing a free page is misuse, which
    `count_pool_faults` shows.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    return pool._replace(ref=put(pool.ref, ids, 1, "add"))


def release(pool: Pool, ids: Int32[Array, "..."]) -> Pool:
    """Takes one use from every page in `ids`; pages without uses become free.

    They go on the stack in the order in which they stand in `ids`, row by row, an id
    that stands several times at its last place: it loses as many uses. `NO_PAGE` is
    ignored. Counts are never clamped: a page released more often than it was used keeps
    a negative count, which `count_pool_faults` shows.
    """
    return release_counted(pool, ids)[0]


def release_counted(
    pool: Pool,
    ids: Int32[Array, "*places"],
    *,
    shared: Int32[Array, "..."] | None = None,
) -> tuple[Pool, Int32[Array, "*places"]]:
    """As `release`; also tells the uses that each page in `ids` has left.

    Pages in `shared` gain a use each before, as by `share`.
    """
    shape, ids = ids.shape, ids.reshape(-1)
    changed, uses = ids, jnp.full(ids.shape, -1, jnp.int32)
    if shared is not None:
        shared = shared.reshape(-1)
        changed = jnp.concatenate([shared, changed])
        uses = jnp.concatenate([jnp.ones(shared.shape, jnp.int32), uses])
    ref = put(pool.ref, changed, uses, "add")
    left = take(ref, ids, fill=1)
    zeroed = jnp.where(left == 0, ids, NO_PAGE)
    # An id may stand several times but is pushed once. The counts that reached zero
    # serve as scratch: every entry bids for its page there, and the last one wins.
    bid = -1 - jnp.arange(ids.size, dtype=jnp.int32)
    ref = put(ref, zeroed, bid, "min")
    won = take(ref, zeroed, fill=0) == bid
    rank = arrays.ranks(won)
    # Only winners write the zero back. To let all bidders do it would be as right, but
    # XLA then no longer sees that the bids were read before, and copies the counts.
    ref = put(ref, jnp.where(won, ids, NO_PAGE), 0, "set")
    top = jnp.where(won, pool.num_free + rank, NO_PAGE)
    pool = Pool(
        ref=ref,
        stack=put(pool.stack, top, ids, "set"),
        num_free=pool.num_free + jnp.sum(won, dtype=jnp.int32),
    )
    return pool, left.reshape(shape)


def count_pool_faults(pool: Pool) -> Int32[Array, ""]:
    """Counts what breaks conservation (I2): 0 on a sound pool.

    The free entries of the stack are distinct and are exactly the pages with count
    zero, and no count is negative. Looks at every page: for tests and debug mode.

    Returns:
      Pages whose count is negative, plus pages that are free by count but not once on
      the stack or the reverse, plus free entries of the stack that are no page id, plus
      1 if `num_free` is out of range.
    """
    (num_pages,) = pool.ref.shape
    free = jnp.arange(num_pages, dtype=jnp.int32) < pool.num_free
    stack = jnp.where(free, pool.stack, NO_PAGE)
    strange = free & ((stack < 0) | (stack >= num_pages))
    stacked = put(jnp.zeros_like(pool.ref), stack, 1, "add")
    differs = stacked != (pool.ref == 0).astype(jnp.int32)
    impossible = (pool.num_free < 0) | (pool.num_free > num_pages)
    return (
        jnp.sum(differs | (pool.ref < 0), dtype=jnp.int32)
        + jnp.sum(strange, dtype=jnp.int32)
        + impossible.astype(jnp.int32)
    )
