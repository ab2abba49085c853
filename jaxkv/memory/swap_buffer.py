"""The staging buffer: pages of requests that were swapped out of the pool.

It holds a copy of every page of such a request, of all layers, and a table of its own
that says which sequence had them where. From here the pages come back into the pool, or
the host takes them to its own memory and brings them back later; so without a host the
buffer is all the swap space there is. All pages of a request are in one place: in the
pool, in the buffer, or with the host.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.5.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.memory import demand, kv_pages, page_pool
from jaxkv.memory.kv_pages import Pages
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table

NO_SEQUENCE = -1
"""Owner of a place that is free."""


class Staging(NamedTuple):
    """The buffer and its table."""

    pages: Pages
    """K and V, `[layers, places, ...]`."""
    owner: Int32[Array, " places"]
    """Request whose page stands in each place, by the row of its first sequence, or
    NOBODY."""
    page_ids: Int32[Array, "sequences pages_per_slot"]
    """Place of each page of each sequence, `NO_PAGE` beyond; of requests on the host
    the places that they had."""
    length: Int32[Array, " sequences"]
    """Tokens written to those pages."""
    on_host: Bool[Array, " sequences"]
    """Requests whose pages are in the memory of the host, by the same row."""


def make_staging(
    pages: Pages, *, num_places: int, num_sequences: int, pages_per_slot: int
) -> Staging:
    """Makes an empty buffer for pages like those given."""

    def like(leaf: Array) -> Array:
        return jnp.zeros((leaf.shape[0], num_places, *leaf.shape[2:]), leaf.dtype)

    return Staging(
        pages=jax.tree.map(like, pages),
        owner=jnp.full((num_places,), NO_SEQUENCE, jnp.int32),
        page_ids=jnp.full((num_sequences, pages_per_slot), NO_PAGE, jnp.int32),
        length=jnp.zeros((num_sequences,), jnp.int32),
        on_host=jnp.zeros((num_sequences,), bool),
    )


def num_free(staging: Staging) -> Int32[Array, ""]:
    """Counts the places that are free."""
    return jnp.sum(staging.owner < 0, dtype=jnp.int32)


def num_pages(staging: Staging, groups: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Counts the pages that requests have in the buffer."""
    mine = (staging.owner[None, :] == groups[:, None]) & (groups >= 0)[:, None]
    return jnp.sum(mine, axis=1, dtype=jnp.int32)


def is_staged(staging: Staging) -> Bool[Array, " sequences"]:
    """Says, in the row of its first sequence, which request has pages in the buffer."""
    nobody = jnp.zeros_like(staging.on_host)
    return arrays.put(nobody, staging.owner, True)


def is_out(staging: Staging) -> Bool[Array, " sequences"]:
    """Says, in the row of its first sequence, which request is swapped out."""
    return staging.on_host | is_staged(staging)


def written(table: Table, *, page_size: int) -> Bool[Array, "slots pages_per_slot"]:
    """Marks the places in the table whose pages have something in them."""
    column = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    used = demand.pages_for(table.length, page_size=page_size)
    return column < used[:, None]


def move_out(
    staging: Staging,
    pages: Pages,
    table: Table,
    holder: Int32[Array, "slots pages_per_slot"],
    row: Int32[Array, " slots"],
    group: Int32[Array, " slots"],
    *,
    page_size: int,
) -> tuple[Staging, Bool[Array, " slots"]]:
    """Copies the pages of whole groups to the buffer; the caller drops their slots.

    A page that several slots of a group share, of which `holder` is the one that
    accounts for it, see `page_sharing.holders`, moves once. `row` is the sequence of
    each slot that leaves, NOBODY for those that stay, and `group` the row of the first
    sequence of its request. Places that are reserved and not written are not kept.
    Costs nothing like a copy where nobody leaves.

    Returns:
      The new buffer, and which slots are in it: all that leave, or nobody if there is
      no room for all of them or nothing is written.
    """
    leaves = row >= 0
    slot, column = (jnp.arange(n, dtype=jnp.int32) for n in holder.shape)
    mapped = leaves[:, None] & written(table, page_size=page_size)
    own = mapped & (holder == slot[:, None])
    leaves &= (jnp.sum(own, dtype=jnp.int32) <= num_free(staging)) & jnp.any(own)

    def copy(_: Array, s: Staging) -> Staging:
        # The k-th page gets the k-th free place: equal ranks meet in one gather.
        order = arrays.places(s.owner < 0, s.owner.shape[0])
        rank = arrays.ranks(own.reshape(-1)).reshape(own.shape)
        place = arrays.take(order, rank, fill=NO_PAGE)
        source = jnp.where(own, table.page_ids, NO_PAGE).reshape(-1)
        owners = jnp.broadcast_to(group[:, None], place.shape)
        at = (holder, jnp.broadcast_to(column[None, :], holder.shape))
        shared = jnp.where(mapped, place[at], NO_PAGE)
        return s._replace(
            pages=kv_pages.copy(s.pages, source, place.reshape(-1), origin=pages),
            owner=arrays.put(s.owner, place, owners),
            page_ids=arrays.put(s.page_ids, row, shared),
            length=arrays.put(s.length, row, table.length),
        )

    trips = jnp.any(leaves).astype(jnp.int32)
    return lax.fori_loop(0, trips, copy, staging), leaves


def move_in(
    staging: Staging,
    pages: Pages,
    pool: Pool,
    table: Table,
    group: Int32[Array, " sequences"],
    back: Bool[Array, " sequences"],
    slot: Int32[Array, " sequences"],
) -> tuple[Pages, Pool, Table, Staging]:
    """Gives requests that come back their pages; as many must be free.

    `group` is the request of each sequence, `back` marks requests in the row of each
    one's first sequence, and `slot` is that of each of their sequences, empty before,
    NOBODY for all others.

    Returns:
      What of the arguments has changed: places reserved before are not reserved again.
    """

    def bring(_: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        pages, pool, table, s = carry
        comes = arrays.take(back, s.owner, fill=False)
        pool, ids, _ = page_pool.allocate(pool, comes.astype(jnp.int32), max_pages=1)
        ids = ids[:, 0]
        place = jnp.arange(s.owner.shape[0], dtype=jnp.int32)
        source = jnp.where(comes, place, NO_PAGE)
        pages = kv_pages.copy(pages, source, ids, origin=s.pages)
        rows = arrays.take(ids, s.page_ids, fill=NO_PAGE)
        rows = jnp.where((slot >= 0)[:, None], rows, NO_PAGE)
        # Counted by uses, and no longer by having been taken.
        pool = page_pool.share(pool, rows)
        pool = pool._replace(ref=arrays.put(pool.ref, ids, -1, "add"))
        table = table._replace(
            page_ids=arrays.put(table.page_ids, slot, rows),
            length=arrays.put(table.length, slot, s.length),
        )
        return pages, pool, table, forget(s, group, back)

    trips = jnp.any(back).astype(jnp.int32)
    return lax.fori_loop(0, trips, bring, (pages, pool, table, staging))


def forget(
    staging: Staging,
    group: Int32[Array, " sequences"],
    gone: Bool[Array, " sequences"],
) -> Staging:
    """Gives up the pages of requests: they are in the pool again, or lost.

    `group` is the request of each sequence; `gone` marks those requests, in the row of
    each one's first sequence.
    """
    freed = arrays.take(gone, staging.owner, fill=False)
    members = arrays.take(gone, group, fill=False)
    return staging._replace(
        owner=jnp.where(freed, NO_SEQUENCE, staging.owner),
        page_ids=jnp.where(members[:, None], NO_PAGE, staging.page_ids),
        length=jnp.where(members, 0, staging.length),
        on_host=staging.on_host & ~gone,
    )


def unsound(
    staging: Staging,
    group: Int32[Array, " sequences"],
    waits: Bool[Array, " sequences"],
    *,
    page_size: int,
) -> Int32[Array, ""]:
    """Counts the faults of the buffer: 0 on a sound one.

    A place belongs to a request exactly if a waiting sequence of it names the place. A
    sequence names ceil(length / page_size) places, and none unless its request is
    swapped out. No request is in the buffer and with the host. `group` is the request
    of each sequence, and `waits` those that wait for a slot.
    """
    s = staging
    out, host = (arrays.take(x, group, fill=False) for x in (is_out(s), s.on_host))
    used = -(-s.length // page_size)
    column = jnp.arange(s.page_ids.shape[1], dtype=jnp.int32)[None, :]
    misplaced = (s.page_ids != NO_PAGE) != (column < used[:, None])
    ghost = (s.length != 0) & ~(out & waits)
    staged = jnp.where((out & ~host)[:, None], s.page_ids, NO_PAGE)
    owner = arrays.take(s.owner, staged, fill=NO_SEQUENCE)
    foreign = (staged != NO_PAGE) & (owner != group[:, None])
    named = arrays.put(jnp.zeros(s.owner.shape, bool), staged, True)
    both = s.on_host & is_staged(s)
    faults = (misplaced, ghost, foreign, named != (s.owner >= 0), both)
    return sum(
        (jnp.sum(fault, dtype=jnp.int32) for fault in faults), jnp.zeros((), jnp.int32)
    )
