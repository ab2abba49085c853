"""The swap buffer: pages of requests that were swapped out of the pool.

It holds a copy of every page of such a request, of all layers, and a page table for
them. Pages return from here to the pool, or the host copies them to its memory and
brings them back later; without host memory, this buffer is the whole swap space. All
pages of a request are in one location: the pool, the buffer, or the host.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.5.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory import demand, kv_pages, page_pool
from jaxkv.memory.kv_pages import Pages
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table

NO_SEQUENCE = -1
"""Owner of a free place, and slot or sequence of an entry to skip."""


class Staging(NamedTuple):
    """The swap buffer and its page table."""

    pages: Pages
    """K and V, `[layers, places, ...]`."""
    owner: Int32[Array, " places"]
    """Request of the page in each place, named by the row of its first sequence;
    `NO_SEQUENCE` if the place is free."""
    page_ids: Int32[Array, "sequences pages_per_slot"]
    """Place of each page of each sequence, padded with `NO_PAGE`; for requests on the
    host the places that they had."""
    length: Int32[Array, " sequences"]
    """Number of tokens written to these pages."""
    on_host: Bool[Array, " sequences"]
    """True for requests whose pages are in host memory, in the row of the first
    sequence."""


@validation.checks_numbers(num_places=0, num_sequences=0, pages_per_slot=0)
def make_staging(
    pages: Pages, *, num_places: int, num_sequences: int, pages_per_slot: int
) -> Staging:
    """Makes an empty swap buffer for pages with the leaves of `pages`."""

    def like(leaf: Array) -> Array:
        return jnp.zeros((leaf.shape[0], num_places, *leaf.shape[2:]), leaf.dtype)

    return Staging(
        pages=jax.tree.map(like, pages.by_page),
        owner=jnp.full((num_places,), NO_SEQUENCE, jnp.int32),
        page_ids=jnp.full((num_sequences, pages_per_slot), NO_PAGE, jnp.int32),
        length=jnp.zeros((num_sequences,), jnp.int32),
        on_host=jnp.zeros((num_sequences,), bool),
    )


def num_free_places(staging: Staging) -> Int32[Array, ""]:
    """Returns the number of free places in the swap buffer."""
    return jnp.sum(staging.owner < 0, dtype=jnp.int32)


def is_staged(staging: Staging) -> Bool[Array, " sequences"]:
    """Returns True for requests with pages in the buffer, by their first sequence."""
    none = jnp.zeros_like(staging.on_host)
    return arrays.put(none, staging.owner, True)


def is_out(staging: Staging) -> Bool[Array, " sequences"]:
    """Returns True for requests that are swapped out, by their first sequence."""
    return staging.on_host | is_staged(staging)


@validation.checks_numbers()
def is_written(table: Table, *, page_size: int) -> Bool[Array, "slots pages_per_slot"]:
    """Marks the table entries whose pages hold written tokens."""
    column = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    used = demand.pages_for(table.length, page_size=page_size)
    return column < used[:, None]


@validation.checks_numbers()
def copy_out(
    staging: Staging,
    pages: Pages,
    table: Table,
    holder: Int32[Array, "slots pages_per_slot"],
    row: Int32[Array, " slots"],
    group: Int32[Array, " slots"],
    *,
    page_size: int,
) -> tuple[Staging, Bool[Array, " slots"]]:
    """Swaps out the pages of whole groups; the caller drops their slots.

    A page that several slots of a group share moves once. Places that are reserved but
    not written are not kept. The cost is close to zero if no slot leaves.

    Args:
      staging: the swap buffer.
      pages: the pages of the pool.
      table: the page table.
      holder: the slot that accounts for each page, see `page_sharing.holders`.
      row: sequence of each slot that leaves, `NO_SEQUENCE` for slots that stay.
      group: row of the first sequence of each slot's request.
      page_size: token places in a page.

    Returns:
      The new buffer, and True for slots that are in it: all slots that leave, or none
      if the buffer has too few free places or no tokens are written.
    """
    leaves = row >= 0
    slot, column = (jnp.arange(n, dtype=jnp.int32) for n in holder.shape)
    mapped = leaves[:, None] & is_written(table, page_size=page_size)
    is_held = mapped & (holder == slot[:, None])
    leaves &= (jnp.sum(is_held, dtype=jnp.int32) <= num_free_places(staging)) & jnp.any(
        is_held
    )

    def copy(_: Array, s: Staging) -> Staging:
        # Page k gets free place k: equal ranks use one gather.
        order = arrays.marked_indices(s.owner < 0, s.owner.shape[0])
        rank = arrays.number_marked(is_held.reshape(-1)).reshape(is_held.shape)
        place = arrays.take(order, rank, fill=NO_PAGE)
        source = jnp.where(is_held, table.page_ids, NO_PAGE).reshape(-1)
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


def copy_in(
    staging: Staging,
    pages: Pages,
    pool: Pool,
    table: Table,
    group: Int32[Array, " sequences"],
    back: Bool[Array, " sequences"],
    slot: Int32[Array, " sequences"],
) -> tuple[Pages, Pool, Table, Staging]:
    """Swaps in the pages of requests; the pool must have enough free pages.

    Args:
      staging: the swap buffer.
      pages: the pages of the pool.
      pool: the pool.
      table: the page table.
      group: request of each sequence.
      back: True for requests that return, in the row of their first sequence.
      slot: empty slot of each returning sequence, `NO_SEQUENCE` elsewhere.

    Returns:
      The new pages, pool, table and buffer. Places that were reserved before the swap
      are not reserved again.
    """

    def bring(
        _: Array, carry: tuple[Pages, Pool, Table, Staging]
    ) -> tuple[Pages, Pool, Table, Staging]:
        pages, pool, table, s = carry
        comes = arrays.take(back, s.owner, fill=False)
        pool, ids, _ = page_pool.allocate(pool, comes.astype(jnp.int32), max_pages=1)
        ids = ids[:, 0]
        place = jnp.arange(s.owner.shape[0], dtype=jnp.int32)
        source = jnp.where(comes, place, NO_PAGE)
        pages = kv_pages.copy(pages, source, ids, origin=s.pages)
        rows = arrays.take(ids, s.page_ids, fill=NO_PAGE)
        rows = jnp.where((slot >= 0)[:, None], rows, NO_PAGE)
        # Allocation gave each page one use; its uses in the table replace that one.
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
    is_forgotten: Bool[Array, " sequences"],
) -> Staging:
    """Frees the places of requests whose pages are in the pool again, or lost.

    `group` is the request of each sequence; `is_forgotten` is True for these requests,
    in the row of their first sequence.
    """
    freed = arrays.take(is_forgotten, staging.owner, fill=False)
    members = arrays.take(is_forgotten, group, fill=False)
    return staging._replace(
        owner=jnp.where(freed, NO_SEQUENCE, staging.owner),
        page_ids=jnp.where(members[:, None], NO_PAGE, staging.page_ids),
        length=jnp.where(members, 0, staging.length),
        on_host=staging.on_host & ~is_forgotten,
    )


@validation.checks_numbers()
def count_swap_faults(
    staging: Staging,
    group: Int32[Array, " sequences"],
    waits: Bool[Array, " sequences"],
    *,
    page_size: int,
) -> Int32[Array, ""]:
    """Counts the faults of the swap buffer; 0 if it is sound.

    A place belongs to a request exactly if a waiting sequence of the request refers to
    it. A sequence has ceil(length / page_size) places, and none unless its request is
    swapped out. No request is both in the buffer and on the host. `group` is the
    request of each sequence, and `waits` is True for sequences that wait for a slot.
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
