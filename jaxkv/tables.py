"""Page tables: which pages hold the tokens of each slot, in token order.

A slot's row is valid for exactly the pages that its tokens and its reserved places
cover, and `NO_PAGE` beyond. Tables and pool move together: every operation that maps
or unmaps a page takes and returns both, so that counts always equal uses.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
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


class Violations(NamedTuple):
    """How many entries break each invariant; all 0 on a sound state."""

    i1: Int32[Array, ""]
    """Pages whose count is not their uses in tables plus their pins."""
    i2: Int32[Array, ""]
    """Breaches of conservation, see `paging.unsound`."""
    i4: Int32[Array, ""]
    """Places that break the form of their row, and slots with impossible lengths."""
    i5: Int32[Array, ""]
    """Slots that are not live and yet have a length, reserved places or a page."""


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


def reserve(
    pool: Pool,
    table: Table,
    places: Int32[Array, " slots"],
    *,
    page_size: int,
    max_new_pages: int,
) -> tuple[Pool, Table, Bool[Array, ""]]:
    """Appends pages until every slot has `places` token places, all or nothing.

    Args:
      pool: the pool to take pages from.
      table: the slots to extend.
      places: token places that each slot shall have, written ones included. A slot
        that has as many already is left alone, so 0 asks for nothing.
      page_size: token places in a page, static.
      max_new_pages: pages that one call may append to one slot, static.

    Returns:
      The new pool and table, the new places counted in `ahead`, and whether every
      slot was served. If the pool has too few pages, or a slot would exceed
      `max_new_pages` or its row, pool and table are unchanged bit for bit.

    Raises:
      ValueError: `max_new_pages` is below 1.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.3.
    """
    if max_new_pages < 1:
        raise ValueError(f"{max_new_pages=} must be at least 1")
    max_slots, pages_per_slot = table.page_ids.shape
    have = num_pages(table, page_size=page_size)
    goal = jnp.maximum(table.length + table.ahead, places)
    need = pages_for(goal, page_size=page_size)
    # A slot that outgrows its row asks for more than `allocate` grants to anyone.
    want = jnp.where(need <= pages_per_slot, need - have, max_new_pages + 1)
    pool, ids, enough = paging.allocate(pool, want, max_pages=max_new_pages)
    slot = jnp.arange(max_slots, dtype=jnp.int32)[:, None]
    place = jnp.arange(pages_per_slot, dtype=jnp.int32)[None, :]
    new = paging.take(ids, (slot, place - have[:, None]), fill=NO_PAGE)
    page_ids = jnp.where(new == NO_PAGE, table.page_ids, new)
    ahead = jnp.where(enough, goal - table.length, table.ahead)
    return pool, table._replace(page_ids=page_ids, ahead=ahead), enough


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
        `ahead` negative, which `violations` shows.

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
    pool: Pool, table: Table, source: Int32[Array, " slots"]
) -> tuple[Pool, Table]:
    """Makes empty slots continue other slots, on the same pages.

    All sources are read before any slot changes. The last page is shared too, even if
    it is not full: whoever writes to it next has to copy it first.

    Args:
      pool: the pool that holds the pages.
      table: the slots.
      source: slot that each slot becomes a copy of, in [0, slots), or -1 to leave it.
        A slot that becomes a copy must be empty: pages that it held would be lost,
        which `violations` shows.

    Returns:
      The new pool and table.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    after = _follow(table, source)
    copied = (source >= 0)[:, None]
    return paging.share(pool, jnp.where(copied, after.page_ids, NO_PAGE)), after


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
) -> tuple[Pool, Table, Bool[Array, ""]]:
    """Carries out a plan: first drops slots, then reserves places.

    Args:
      pool: the pool.
      table: the slots.
      plan: slots to `drop`, and the `places` that each slot shall have afterwards.
      page_size: token places in a page, static.
      max_new_pages: pages that one call may append to one slot, static.

    Returns:
      The new pool and table, and whether every slot was served. If not, the slots in
      `plan.drop` are empty all the same, and nothing else has changed.
    """
    pool, table = drop(pool, table, plan.drop)
    return reserve(
        pool, table, plan.places, page_size=page_size, max_new_pages=max_new_pages
    )


def violations(
    pool: Pool,
    table: Table,
    live: Bool[Array, " slots"],
    *,
    page_size: int,
    pins: Int32[Array, " pages"] | None = None,
) -> Violations:
    """Counts what breaks the invariants of pool and tables, each by its number.

    I1: a page's count is the number of its places in live rows, plus its pins. I2: the
    free pages are those with count zero. I4: a row is valid for exactly
    ceil((length + ahead) / page_size) places, distinct pages there and `NO_PAGE`
    beyond, and neither number is negative. I5: a slot that is not live holds nothing.

    Looks at every page and sorts every row: for tests and debug mode.

    Args:
      pool: the pool.
      table: the slots.
      live: slots that hold a sequence.
      page_size: token places in a page, static.
      pins: uses of each page outside the table; None means none.

    Returns:
      The counts.
    """
    (total,) = pool.ref.shape
    _, pages_per_slot = table.page_ids.shape
    have = num_pages(table, page_size=page_size)
    place = jnp.arange(pages_per_slot, dtype=jnp.int32)[None, :]
    valid = place < have[:, None]
    held = jnp.zeros_like(pool.ref) if pins is None else pins
    used = jnp.where(valid & live[:, None], table.page_ids, NO_PAGE)
    held = paging.put(held, used, 1, "add")
    is_page = (table.page_ids >= 0) & (table.page_ids < total)
    misplaced = jnp.where(valid, ~is_page, table.page_ids != NO_PAGE)
    row = jnp.sort(jnp.where(valid & is_page, table.page_ids, NO_PAGE), axis=1)
    repeated = (row[:, 1:] == row[:, :-1]) & (row[:, 1:] != NO_PAGE)
    impossible = (table.length < 0) | (table.ahead < 0) | (have > pages_per_slot)

    mapped = jnp.any(table.page_ids != NO_PAGE, axis=1)
    ghost = ~live & ((table.length != 0) | (table.ahead != 0) | mapped)
    count = partial(jnp.sum, dtype=jnp.int32)
    return Violations(
        i1=count(held != pool.ref),
        i2=paging.unsound(pool),
        i4=count(misplaced) + count(repeated) + count(impossible),
        i5=count(ghost),
    )


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
