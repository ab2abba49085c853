"""The page pool: reference counts of all pages, and the free pages.

A pool is a value. Every operation takes a pool and returns the next one, all shapes are
fixed, and the cost depends on the number of pages in the arguments, never on the size
of the pool: free pages are on a stack, so no search is needed.

A missing page is `NO_PAGE`; all indexing by page ids uses `arrays.put` and
`arrays.take`, which skip it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.arrays import put, take

NO_PAGE = arrays.NONE
"""Page id of an unmapped entry of a table or list."""


class Pool(NamedTuple):
    """Reference counts of all pages, and a stack of the free pages."""

    ref: Int32[Array, " pages"]
    """Reference count of each page: entries in tables plus pins of caches. 0 means
    free."""
    stack: Int32[Array, " pages"]
    """The first `num_free` entries are the free page ids; the last of them is allocated
    next. Further entries are undefined."""
    num_free: Int32[Array, ""]
    """Number of free pages."""


def make_pool(num_pages: int, order: Int32[Array, " pages"] | None = None) -> Pool:
    """Makes a pool of free pages.

    Pages are allocated in the given order, a permutation of the page ids; None means
    ascending ids. `count_pool_faults` finds an `order` that is not a permutation.

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


@validation.checks_numbers()
def allocate(
    pool: Pool, want: Int32[Array, " n"], *, max_pages: int
) -> tuple[Pool, Int32[Array, "n {max_pages}"], Bool[Array, ""]]:
    """Allocates `want[row]` free pages, in [0, max_pages], for all rows or for none.

    Row 0 is served first, and the page released last is allocated first, so equal
    inputs give equal page ids.

    Returns:
      The new pool, in which allocated pages have a count of one; the page ids,
      `NO_PAGE` past `want[row]`; and True if there were enough pages. If False, or if
      an entry of `want` is out of range, the pool is unchanged and every id is
      `NO_PAGE`.

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
    """Allocates free pages as `allocate` does, and scatters them to given columns.

    Args:
      pool: the pool.
      want: number of pages of each row.
      rank: for each column, the index in [0, want[row]) of the row's page that it gets,
        each index once; columns with an index out of range get `NO_PAGE`.
      may: True if pages may be allocated at all.
      back: pages that lose a use if the allocation succeeds; each must keep another
        use.

    Returns:
      The new pool; the page ids; and True if there were enough pages.
    """
    total = jnp.sum(want, dtype=jnp.int32)
    enough = may & jnp.all(want >= 0) & (total <= pool.num_free)
    # Page k of the request is entry k from the top of the stack: equal ranks use one
    # gather.
    start = jnp.cumsum(want, dtype=jnp.int32) - want
    is_wanted = (rank >= 0) & (rank < want[:, None]) & enough
    depth = jnp.where(is_wanted, pool.num_free - 1 - start[:, None] - rank, NO_PAGE)
    ids = take(pool.stack, depth, fill=NO_PAGE)
    num_free = pool.num_free - jnp.where(enough, total, 0)
    changed = ids.reshape(-1)
    uses = jnp.ones(ids.size, jnp.int32)
    if back is not None:
        back = jnp.where(enough, back, NO_PAGE).reshape(-1)
        changed = jnp.concatenate([changed, back])
        uses = jnp.concatenate([uses, jnp.full_like(back, -1)])
    ref = put(pool.ref, changed, uses, "add")
    return pool._replace(ref=ref, num_free=num_free), ids, enough


def share(pool: Pool, ids: Int32[Array, "..."]) -> Pool:
    """Adds one use to every page in `ids`; `NO_PAGE` is ignored.

    An id that is repeated m times gains m uses. Sharing a free page is an error that
    `count_pool_faults` detects.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    return pool._replace(ref=put(pool.ref, ids, 1, "add"))


def release(pool: Pool, ids: Int32[Array, "..."]) -> Pool:
    """Removes one use from every page in `ids`; pages without uses become free.

    Freed pages are pushed onto the stack in the order of `ids`, row by row; an id that
    is repeated loses that many uses and is pushed at its last occurrence. `NO_PAGE` is
    ignored. Counts are not clamped: a page released more often than it was used keeps a
    negative count, which `count_pool_faults` detects.
    """
    return release_counted(pool, ids)[0]


def release_counted(
    pool: Pool,
    ids: Int32[Array, "*places"],
    *,
    shared: Int32[Array, "..."] | None = None,
) -> tuple[Pool, Int32[Array, "*places"]]:
    """Releases pages as `release` does; also returns the remaining uses of each page.

    Pages in `shared` first gain a use each, as by `share`.
    """
    shape = ids.shape
    ids = ids.reshape(-1)
    changed = ids
    uses = jnp.full(ids.shape, -1, jnp.int32)
    if shared is not None:
        shared = shared.reshape(-1)
        changed = jnp.concatenate([shared, changed])
        uses = jnp.concatenate([jnp.ones(shared.shape, jnp.int32), uses])
    ref = put(pool.ref, changed, uses, "add")
    left = take(ref, ids, fill=1)
    zeroed = jnp.where(left == 0, ids, NO_PAGE)
    # A repeated id is pushed once. The counts that reached zero serve as scratch
    # memory: every entry writes its bid there, and the last entry wins.
    bid = -1 - jnp.arange(ids.size, dtype=jnp.int32)
    ref = put(ref, zeroed, bid, "min")
    won = take(ref, zeroed, fill=0) == bid
    rank = arrays.number_marked(won)
    # Only winners restore the zero. If all entries did, XLA would not see that the bids
    # were read before, and would copy the counts.
    ref = put(ref, jnp.where(won, ids, NO_PAGE), 0, "set")
    top = jnp.where(won, pool.num_free + rank, NO_PAGE)
    pool = Pool(
        ref=ref,
        stack=put(pool.stack, top, ids, "set"),
        num_free=pool.num_free + jnp.sum(won, dtype=jnp.int32),
    )
    return pool, left.reshape(shape)


def count_pool_faults(pool: Pool) -> Int32[Array, ""]:
    """Counts violations of conservation (I2); 0 if the pool is sound.

    The free entries of the stack are distinct and are exactly the pages with count
    zero, and no count is negative. Reads every page: for tests and debug mode.

    Returns:
      Number of pages with a negative count, plus pages that are free by count but not
      exactly once on the stack or the reverse, plus invalid ids on the stack, plus 1 if
      `num_free` is out of range.
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
