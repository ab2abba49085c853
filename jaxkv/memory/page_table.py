"""Page tables: which pages hold the tokens of each slot, in token order.

A slot's row is valid for exactly the pages that its tokens and its reserved places
cover, and `NO_PAGE` beyond. Tables and pool move together: every operation that maps
or unmaps a page takes and returns both, so that counts always equal uses.
"""

import collections
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory import demand, page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool

_MOST_SHOWN = 16
"""Page ids of a slot that the text form shows."""


class Table(NamedTuple):
    """The page table of every slot."""

    page_ids: Int32[Array, "slots pages_per_slot"]
    """Page of each run of `page_size` token places, in token order."""
    length: Int32[Array, " slots"]
    """Tokens whose K and V are written and accepted."""
    ahead: Int32[Array, " slots"]
    """Token places beyond `length` that are reserved, or written provisionally."""


class SlotPages(NamedTuple):
    """The pages of one slot, on the host."""

    slot: int
    request_id: int
    """The caller's name for its request."""
    sample: int
    """Index of the sequence within the request."""
    num_tokens: int
    """Tokens whose K and V are written."""
    page_ids: tuple[int, ...]
    """Its pages in token order; reserved ones may follow the written ones."""


class PageTableView(NamedTuple):
    """A page table on the host, for people: it prints as text and as HTML."""

    slots: tuple[SlotPages, ...]
    """The occupied slots."""
    page_size: int
    """Tokens of a page."""
    num_pages: int
    """Pages of the pool."""

    @property
    def num_uses(self) -> collections.Counter[int]:
        """How many slots use each page, by page id."""
        return collections.Counter(x for slot in self.slots for x in slot.page_ids)

    @property
    def title(self) -> str:
        """A line with the number of pages in use, and of those that slots share."""
        uses = self.num_uses
        shared = sum(num > 1 for num in uses.values())
        return (
            f"{len(uses)} of {self.num_pages} pages of {self.page_size} tokens in use, "
            f"{shared} shared"
        )

    def __str__(self) -> str:
        """A line per slot; a page that slots share has a star."""
        uses, lines = self.num_uses, [self.title]
        if self.slots:
            lines.append("slot  request  sample  tokens  pages")
        for slot in self.slots:
            pages = [f"{x}*" if uses[x] > 1 else f"{x}" for x in slot.page_ids]
            hidden = len(pages) - _MOST_SHOWN
            more = f" ... {hidden} more" if hidden > 0 else ""
            lines.append(
                f"{slot.slot:4}  {slot.request_id:7}  {slot.sample:6}  "
                f"{slot.num_tokens:6}  {' '.join(pages[:_MOST_SHOWN])}{more}"
            )
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """A table for notebooks; pages that slots share are bold."""
        uses = self.num_uses
        head = "".join(
            f"<th>{name}</th>"
            for name in ("slot", "request", "sample", "tokens", "pages")
        )
        rows = []
        for slot in self.slots:
            pages = [f"<b>{x}</b>" if uses[x] > 1 else f"{x}" for x in slot.page_ids]
            cells = [*map(str, slot[:4]), " ".join(pages)]
            rows.append("".join(f"<td>{cell}</td>" for cell in cells))
        body = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
        return f"<table><caption>{self.title}</caption>{body}</table>"


class Copies(NamedTuple):
    """Pages that the caller copies before it writes: those that others read too."""

    source: Int32[Array, " slots"]
    """Page that each slot mapped and shared so far, or `NO_PAGE`."""
    target: Int32[Array, " slots"]
    """Page of its own that it maps instead, or `NO_PAGE`."""


def make_table(max_slots: int, max_pages_per_slot: int) -> Table:
    """Makes a table of empty slots; both sizes are static.

    Raises:
      ValueError: a size is below 1.
    """
    max_slots = validation.integer("max_slots", max_slots, low=1)
    num_columns = validation.integer("max_pages_per_slot", max_pages_per_slot, low=1)
    return Table(
        page_ids=jnp.full((max_slots, num_columns), NO_PAGE, jnp.int32),
        length=jnp.zeros(max_slots, jnp.int32),
        ahead=jnp.zeros(max_slots, jnp.int32),
    )


def num_pages(table: Table, *, page_size: int) -> Int32[Array, " slots"]:
    """Counts the pages that each slot holds."""
    return demand.pages_for(table.length + table.ahead, page_size=page_size)


def needs_copy(
    pool: Pool, table: Table, num_rows: Int32[Array, " slots"], *, page_size: int
) -> Bool[Array, " slots"]:
    """Says which slots cannot write to their last page before it is copied.

    They need one page more than those that `reserve` appends. Of the slots that write
    to a page at the same time, each copies it that leaves it another owner: all of them
    if someone else holds the page too, else all but the last, which writes in place. So
    a slot that turns out not to write never raises the sum over those that do.
    `num_rows` are the token places that each slot will write from its length on; those
    with none, or with a number below 0, need nothing.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    page = _written_page(table, num_rows, page_size)
    # Shapes [writers before, slots]: their sum over the leading axis is the fast one.
    slot = jnp.arange(page.shape[0], dtype=jnp.int32)
    before = (page[:, None] == page[None, :]) & (slot[:, None] < slot[None, :])
    rank = jnp.sum(before, axis=0, dtype=jnp.int32)
    return rank < arrays.take(pool.ref, page, fill=0) - 1


def is_shared(
    pool: Pool, table: Table, num_rows: Int32[Array, " slots"], *, page_size: int
) -> Bool[Array, " slots"]:
    """Says which slots will write to a page that others hold; else none needs a copy.

    Arguments are those of `needs_copy`.
    """
    page = _written_page(table, num_rows, page_size)
    return arrays.take(pool.ref, page, fill=0) > 1


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
    one are never shared by `page_sharing.fork`. Where they are all the same, as after
    `page_sharing.reorder` with places reserved, they stay so, and
    `invariants.shared_writes` tells of it.

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
    pages_per_slot = table.page_ids.shape[1]
    have = num_pages(table, page_size=page_size)
    growth = _growth(table, places, page_size)
    parts = jnp.zeros(have.shape, bool)
    if num_rows is not None:
        parts = needs_copy(pool, table, num_rows, page_size=page_size)
    fits = (have + growth <= pages_per_slot) & (growth <= max_new_pages)
    # Of a slot's new pages the copy comes first.
    want = growth + parts.astype(jnp.int32)
    place = jnp.arange(pages_per_slot, dtype=jnp.int32)[None, :]
    rank = place - have[:, None]
    rank = jnp.where(rank >= 0, rank + parts[:, None].astype(jnp.int32), NO_PAGE)
    writes = place == _column(table, page_size)[:, None]
    rank = jnp.where(parts[:, None] & writes, 0, rank)
    column = jnp.where(parts, _column(table, page_size), NO_PAGE)
    shared = _page_at(table.page_ids, column)
    pool, new, enough = page_pool.allocate_at(
        pool, want, rank, may=jnp.all(fits), back=shared
    )
    copies = Copies(
        source=jnp.where(enough, shared, NO_PAGE), target=_page_at(new, column)
    )
    ahead = jnp.maximum(table.ahead, places - table.length)
    table = table._replace(
        page_ids=jnp.where(new == NO_PAGE, table.page_ids, new),
        ahead=jnp.where(enough, ahead, table.ahead),
    )
    return pool, table, copies, enough


def drop_slots(
    pool: Pool, table: Table, mask: Bool[Array, " slots"]
) -> tuple[Pool, Table]:
    """Empties the masked slots, empty ones too, and releases all their pages."""
    rows = jnp.where(mask[:, None], table.page_ids, NO_PAGE)
    return page_pool.release(pool, rows), emptied(table, mask)


def emptied(table: Table, mask: Bool[Array, " slots"]) -> Table:
    """The table without the masked slots, whose pages the caller releases."""
    return Table(
        page_ids=jnp.where(mask[:, None], NO_PAGE, table.page_ids),
        length=jnp.where(mask, 0, table.length),
        ahead=jnp.where(mask, 0, table.ahead),
    )


def advance(table: Table, accepted: Int32[Array, " slots"]) -> Table:
    """Counts reserved places as written, as many as each slot has accepted.

    They are in [0, ahead]. More than that makes `ahead` negative, which
    `invariants.violations` shows.
    """
    return table._replace(length=table.length + accepted, ahead=table.ahead - accepted)


def truncate(
    pool: Pool, table: Table, places: Int32[Array, " slots"], *, page_size: int
) -> tuple[Pool, Table]:
    """Releases reserved places, and the pages that hold nothing else.

    Each slot keeps so many token places; one that has fewer is left alone, and `length`
    is never cut. K and V in the places released are left as they are, to be
    overwritten.
    """
    keep = jnp.clip(places - table.length, 0, table.ahead)
    shorter = table._replace(ahead=keep)
    place = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    beyond = place >= num_pages(shorter, page_size=page_size)[:, None]
    pool = page_pool.release(pool, jnp.where(beyond, table.page_ids, NO_PAGE))
    page_ids = jnp.where(beyond, NO_PAGE, table.page_ids)
    return pool, shorter._replace(page_ids=page_ids)


def _growth(table: Table, places: Array, page_size: int) -> Array:
    """Pages that each slot lacks for its places."""
    have = table.length + table.ahead
    return demand.growth(have, places, page_size=page_size)


def _column(table: Table, page_size: int) -> Array:
    """Column in which each slot writes next."""
    return table.length // page_size


def _written_page(table: Table, num_rows: Array, page_size: int) -> Array:
    """Page that each slot writes to next, `NO_PAGE` where it writes no rows."""
    column = jnp.where(num_rows > 0, _column(table, page_size), NO_PAGE)
    return _page_at(table.page_ids, column)


def _page_at(page_ids: Array, column: Array) -> Array:
    """Page in one column of each row, `NO_PAGE` where there is no such column."""
    num_slots, num_columns = page_ids.shape
    first = jnp.arange(num_slots, dtype=jnp.int32) * num_columns
    there = (column >= 0) & (column < num_columns)
    place = jnp.where(there, first + column, NO_PAGE)
    return arrays.take(page_ids.reshape(-1), place, fill=NO_PAGE)
