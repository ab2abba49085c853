"""Page tables: which pages hold the tokens of each slot, in token order.

A slot's row is valid for exactly the pages that its tokens and its reserved places
cover, and `NO_PAGE` beyond. Tables and pool move together: every operation that maps
or unmaps a page takes and returns both, so that counts always equal uses.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import paging
from jaxkv.paging import NO_PAGE, Pool


class Table(NamedTuple):
    """The page table of every slot."""

    page_ids: Int32[Array, "slots pages_per_slot"]
    """Page of each run of `page_size` token places, in token order."""
    length: Int32[Array, " slots"]
    """Tokens whose K and V are written and accepted."""
    ahead: Int32[Array, " slots"]
    """Token places beyond `length` that are reserved, or written provisionally."""


@runtime_checkable
class Demand(Protocol):
    """What `apply` reads of a plan."""

    @property
    def drop(self) -> Bool[Array, " slots"]:
        """Slots that give back all their pages, first."""

    @property
    def places(self) -> Int32[Array, " slots"]:
        """Token places that each slot shall have then; 0 asks for nothing."""

    @property
    def num_rows(self) -> Int32[Array, " slots"] | None:
        """Token places that each slot will write then, or None, see `reserve`."""


class Copies(NamedTuple):
    """Pages that the caller copies before it writes: those that others read too."""

    source: Int32[Array, " slots"]
    """Page that each slot mapped and shared so far, or `NO_PAGE`."""
    target: Int32[Array, " slots"]
    """Page of its own that it maps instead, or `NO_PAGE`."""


def make_table(max_slots: int, max_pages_per_slot: int) -> Table:
    """Makes a table of empty slots.

    Args:
      max_slots: sequences that run at once, at least 1, static.
      max_pages_per_slot: pages that one sequence may hold, at least 1, static.

    Returns:
      The table.

    Raises:
      ValueError: a size is below 1.
    """
    if max_slots < 1:
        raise ValueError(f"{max_slots=} must be at least 1")
    if max_pages_per_slot < 1:
        raise ValueError(f"{max_pages_per_slot=} must be at least 1")
    return Table(
        page_ids=jnp.full((max_slots, max_pages_per_slot), NO_PAGE, jnp.int32),
        length=jnp.zeros(max_slots, jnp.int32),
        ahead=jnp.zeros(max_slots, jnp.int32),
    )


def pages_for(
    places: Int32[Array, "..."], *, page_size: int | Int32[Array, "..."]
) -> Int32[Array, "..."]:
    """Counts the pages that hold `places` token places: ceil(places / page_size)."""
    return -(-places // page_size)


def num_pages(table: Table, *, page_size: int) -> Int32[Array, " slots"]:
    """Counts the pages that each slot holds."""
    return pages_for(table.length + table.ahead, page_size=page_size)


def needs_copy(
    pool: Pool, table: Table, num_rows: Int32[Array, " slots"], *, page_size: int
) -> Bool[Array, " slots"]:
    """Says which slots cannot write to their last page before it is copied.

    Of the slots that write to a page at the same time, each copies it that leaves it
    another owner: all of them if someone else holds the page too, else all but the
    last, which writes in place. So a slot that turns out not to write never raises
    the sum over those that do.

    Args:
      pool: the pool.
      table: the slots.
      num_rows: token places that each slot will write from its length on; those with
        none, or with a number below 0, need nothing.
      page_size: token places in a page, static.

    Returns:
      The slots that need one page more than those that `reserve` appends.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    page = _next_page(table, page_size)
    page = jnp.where(num_rows > 0, page, NO_PAGE)
    # Shapes [writers before, slots]: their sum over the leading axis is the fast one.
    slot = jnp.arange(page.shape[0], dtype=jnp.int32)
    before = (page[:, None] == page[None, :]) & (slot[:, None] < slot[None, :])
    rank = jnp.sum(before, axis=0, dtype=jnp.int32)
    return rank < paging.take(pool.ref, page, fill=0) - 1


def num_wanted(
    pool: Pool,
    table: Table,
    places: Int32[Array, " slots"],
    num_rows: Int32[Array, " slots"],
    *,
    page_size: int,
) -> Int32[Array, ""]:
    """Counts the free pages that `reserve` would take, copies included."""
    growth = _growth(table, places, page_size)
    copies = needs_copy(pool, table, num_rows, page_size=page_size)
    return jnp.sum(growth + copies.astype(jnp.int32), dtype=jnp.int32)


def reserve(
    pool: Pool,
    table: Table,
    places: Int32[Array, " slots"],
    num_rows: Int32[Array, " slots"] | None = None,
    *,
    page_size: int,
    max_new_pages: int,
) -> tuple[Pool, Table, Copies, Bool[Array, ""]]:
    """Appends pages, and parts those to be written from their other owners.

    A slot that will write to its last page while others hold it too maps a fresh page
    instead (see `needs_copy`); the caller copies before it writes. Pages beyond that
    one are never shared by `fork`. Where they are all the same, as after `reorder` with
    places reserved, they stay so, and `auditing.shared_writes` tells of it.

    Args:
      pool: the pool to take pages from.
      table: the slots to extend.
      places: token places that each slot shall have, written ones included. A slot
        that has as many already is left alone, so 0 asks for nothing.
      num_rows: token places that each slot will write from its length on; None copies
        nothing, for tables whose slots share no page that is not full.
      page_size: token places in a page, static.
      max_new_pages: pages that one call may append to one slot, static.

    Returns:
      The new pool and table, the new places counted in `ahead`; the pages to copy; and
      whether every slot was served. If the pool has too few pages for all of it, or a
      slot would exceed `max_new_pages` or its row, pool and table are unchanged bit
      for bit and there is nothing to copy.

    Raises:
      ValueError: `max_new_pages` is below 1.

    Source: Kwon et al. 2023, arXiv:2309.06180, sections 4.3 and 4.4.
    """
    if max_new_pages < 1:
        raise ValueError(f"{max_new_pages=} must be at least 1")
    max_slots, pages_per_slot = table.page_ids.shape
    have = num_pages(table, page_size=page_size)
    growth = _growth(table, places, page_size)
    if num_rows is None:
        num_rows = jnp.zeros_like(places)
    parts = needs_copy(pool, table, num_rows, page_size=page_size)
    fits = (have + growth <= pages_per_slot) & (growth <= max_new_pages)
    # Of a slot's new pages the copy comes first. One that asks for too many asks for
    # more than `allocate` grants to anyone.
    most = max_new_pages + 1
    want = jnp.where(fits, growth + parts.astype(jnp.int32), most + 1)
    pool, ids, enough = paging.allocate(pool, want, max_pages=most)
    slot = jnp.arange(max_slots, dtype=jnp.int32)[:, None]
    place = jnp.arange(pages_per_slot, dtype=jnp.int32)[None, :]
    rank = place - have[:, None]
    rank = jnp.where(rank >= 0, rank + parts[:, None].astype(jnp.int32), NO_PAGE)
    rank = jnp.where(parts[:, None] & (place == _column(table, page_size)), 0, rank)
    new = paging.take(ids, (slot, rank), fill=NO_PAGE)
    parts &= enough
    copies = Copies(
        source=jnp.where(parts, _next_page(table, page_size), NO_PAGE),
        target=jnp.where(parts, ids[:, 0], NO_PAGE),
    )
    # Each of these pages keeps an owner, so none becomes free.
    pool = pool._replace(ref=paging.put(pool.ref, copies.source, -1, "add"))
    table = table._replace(
        page_ids=jnp.where(new == NO_PAGE, table.page_ids, new),
        ahead=jnp.where(
            enough, jnp.maximum(table.ahead, places - table.length), table.ahead
        ),
    )
    return pool, table, copies, enough


def drop(pool: Pool, table: Table, mask: Bool[Array, " slots"]) -> tuple[Pool, Table]:
    """Empties the masked slots and releases all their pages.

    Args:
      pool: the pool that holds the pages.
      table: the slots.
      mask: slots to empty. An empty slot may be among them.

    Returns:
      The new pool and table.
    """
    pool, page_ids = _unmap(pool, table.page_ids, mask[:, None])
    length = jnp.where(mask, 0, table.length)
    ahead = jnp.where(mask, 0, table.ahead)
    return pool, Table(page_ids=page_ids, length=length, ahead=ahead)


def advance(table: Table, accepted: Int32[Array, " slots"]) -> Table:
    """Counts reserved places as written.

    Args:
      table: the slots.
      accepted: tokens by which each slot grows, in [0, ahead]. More than that makes
        `ahead` negative, which `auditing.violations` shows.

    Returns:
      The new table.
    """
    return table._replace(length=table.length + accepted, ahead=table.ahead - accepted)


def truncate(
    pool: Pool, table: Table, places: Int32[Array, " slots"], *, page_size: int
) -> tuple[Pool, Table]:
    """Gives back reserved places, and the pages that hold nothing else.

    K and V in the places given back are left as they are, to be overwritten.

    Args:
      pool: the pool that holds the pages.
      table: the slots to shorten.
      places: token places that each slot shall keep. A slot that has fewer is left
        alone, and `length` is never cut.
      page_size: token places in a page, static.

    Returns:
      The new pool and table.
    """
    keep = jnp.clip(places - table.length, 0, table.ahead)
    shorter = table._replace(ahead=keep)
    place = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    beyond = place >= num_pages(shorter, page_size=page_size)[:, None]
    pool, page_ids = _unmap(pool, table.page_ids, beyond)
    return pool, shorter._replace(page_ids=page_ids)


def fork(
    pool: Pool, table: Table, source: Int32[Array, " slots"], *, page_size: int
) -> tuple[Pool, Table]:
    """Makes slots copies of other slots, by sharing every page that is written.

    All sources are read before any slot changes. The last page may be partial: it is
    shared as well, and parted by `reserve` before one of its owners writes to it.
    Places reserved ahead stay with the source.

    Args:
      pool: the pool that holds the pages.
      table: the slots.
      source: slot that each slot becomes a copy of, or -1 to leave it. A slot that
        becomes a copy must be empty; if it is not, its pages stay counted as used,
        which `auditing.violations` shows.
      page_size: token places in a page, static.

    Returns:
      The new pool and table.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    copied = source >= 0
    after = _follow(table, source)
    after = after._replace(ahead=jnp.where(copied, 0, after.ahead))
    place = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    beyond = place >= num_pages(after, page_size=page_size)[:, None]
    page_ids = jnp.where(copied[:, None] & beyond, NO_PAGE, after.page_ids)
    pool = paging.share(pool, jnp.where(copied[:, None], page_ids, NO_PAGE))
    return pool, after._replace(page_ids=page_ids)


def reorder(
    pool: Pool, table: Table, source: Int32[Array, " slots"]
) -> tuple[Pool, Table]:
    """Makes slots continue other slots instead of themselves: the beams of a group.

    All sources are read before any slot changes. A page's count changes by its uses
    after less its uses before: a page that a slot keeps in place is not touched, and
    one that no slot continues is released once. Last pages are shared, as by `fork`.

    Args:
      pool: the pool that holds the pages.
      table: the slots.
      source: slot that each slot continues, in [0, slots), or -1 to leave it. Several
        may continue the same slot; what continues an empty slot becomes empty.

    Returns:
      The new pool and table.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    after = _follow(table, source)
    changed = after.page_ids != table.page_ids
    # Gains go first: a page that only moves must not reach zero on its way.
    pool = paging.share(pool, jnp.where(changed, after.page_ids, NO_PAGE))
    return paging.release(pool, jnp.where(changed, table.page_ids, NO_PAGE)), after


def apply(
    pool: Pool, table: Table, plan: Demand, *, page_size: int, max_new_pages: int
) -> tuple[Pool, Table, Copies, Bool[Array, ""]]:
    """Carries out a plan: first drops slots, then reserves places.

    Args:
      pool: the pool.
      table: the slots.
      plan: slots to `drop`, the `places` that each slot shall have afterwards, and the
        `num_rows` that it will write.
      page_size: token places in a page, static.
      max_new_pages: pages that one call may append to one slot, static.

    Returns:
      As `reserve` does. If not every slot was served, those in `plan.drop` are empty
      all the same, and nothing else has changed.
    """
    pool, table = drop(pool, table, plan.drop)
    sizes = {"page_size": page_size, "max_new_pages": max_new_pages}
    return reserve(pool, table, plan.places, plan.num_rows, **sizes)


def owned_pages(
    pool: Pool,
    table: Table,
    first: Int32[Array, " slots"],
    *,
    pins: Int32[Array, " pages"] | Bool[Array, " pages"] | None = None,
) -> Int32[Array, " slots"]:
    """Counts the pages that each slot accounts for: a group's shared ones once.

    They count in the lowest slot that maps them. Slots of one group share pages only in
    the same column, as `fork` and `reorder` leave them; groups share pinned pages only.
    So the sum over a group is what dropping all of it would free.

    Costs nothing like a search: as many passes over the table as the largest group has
    slots beside one, so none where every sequence is alone.

    Args:
      pool: the pool.
      table: the slots.
      first: a slot that stands for the group of each slot, the same for all of it;
        below 0 for a slot that has none.
      pins: uses of each page outside the table, or whether there are any. Such pages
        count for nobody, since dropping the group would not free them.

    Returns:
      The counts.
    """
    slot = jnp.arange(first.shape[0], dtype=jnp.int32)
    before = (first[:, None] == first[None, :]) & (slot[:, None] < slot[None, :])
    before &= (first >= 0)[None, :]
    nearest = jnp.max(jnp.where(before, slot[:, None], -1), axis=0)
    owned = table.page_ids != NO_PAGE
    if pins is not None:
        owned &= ~paging.take(pins, table.page_ids, fill=0).astype(bool)

    def any_left(carry: tuple[Array, Array]) -> Array:
        return jnp.any(carry[0] >= 0)

    def compare(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        other, owned = carry
        theirs = paging.take(table.page_ids, other, fill=NO_PAGE)
        return paging.take(nearest, other, fill=-1), owned & (table.page_ids != theirs)

    _, owned = lax.while_loop(any_left, compare, (nearest, owned))
    return jnp.sum(owned, axis=1, dtype=jnp.int32)


def _growth(table: Table, places: Array, page_size: int) -> Array:
    """Pages that each slot lacks for its places."""
    goal = jnp.maximum(table.length + table.ahead, places)
    return pages_for(goal, page_size=page_size) - num_pages(table, page_size=page_size)


def _column(table: Table, page_size: int) -> Array:
    """Column in which each slot writes next, shape [slots, 1]."""
    return (table.length // page_size)[:, None]


def _next_page(table: Table, page_size: int) -> Array:
    """Page to which each slot writes next, `NO_PAGE` where it is yet to be mapped."""
    slot = jnp.arange(table.length.shape[0], dtype=jnp.int32)
    index = (slot, _column(table, page_size)[:, 0])
    return paging.take(table.page_ids, index, fill=NO_PAGE)


def _unmap(pool: Pool, page_ids: Array, where: Array) -> tuple[Pool, Array]:
    """Releases the pages at the places in `where` and empties those places."""
    pool = paging.release(pool, jnp.where(where, page_ids, NO_PAGE))
    return pool, jnp.where(where, NO_PAGE, page_ids)


def _follow(table: Table, source: Array) -> Table:
    """The table with slots replaced by their sources, all read as they are now."""
    moved = source >= 0
    ids = paging.take(table.page_ids, source, fill=NO_PAGE)
    length = paging.take(table.length, source, fill=0)
    ahead = paging.take(table.ahead, source, fill=0)
    return Table(
        page_ids=jnp.where(moved[:, None], ids, table.page_ids),
        length=jnp.where(moved, length, table.length),
        ahead=jnp.where(moved, ahead, table.ahead),
    )
