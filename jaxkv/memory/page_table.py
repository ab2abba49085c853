"""Page tables (block tables in vLLM): the pages of each slot, in token order.

The row of a slot has the pages that its written and reserved tokens cover, and then
`NO_PAGE`. Operations that map or unmap a page take and return both table and pool, so
that reference counts always equal uses.
"""

import collections
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory import demand, page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool

_MAX_LISTED_PAGES = 16
"""Page ids of a slot that the text form shows."""


class Table(NamedTuple):
    """The page table of every slot."""

    page_ids: Int32[Array, "slots pages_per_slot"]
    """Page of each run of `page_size` token places, in token order."""
    length: Int32[Array, " slots"]
    """Number of tokens whose K and V are written and accepted."""
    ahead: Int32[Array, " slots"]
    """Number of token places after `length` that are reserved or hold unverified
    tokens."""
    evicted: Int32[Array, " slots"] | None = None
    """Number of tokens before `length` that have no place any more, see `kv_eviction`;
    None if tokens are never evicted."""

    @property
    def position(self) -> Int32[Array, " slots"]:
        """Position of each slot's next token: the number of tokens fed."""
        return self.length if self.evicted is None else self.length + self.evicted


class SlotPages(NamedTuple):
    """The pages of one slot, on the host."""

    slot: int
    request_id: int
    """The caller's id of the request."""
    sample: int
    """Index of the sequence within the request."""
    num_tokens: int
    """Number of tokens whose K and V are written."""
    page_ids: tuple[int, ...]
    """Pages in token order; reserved pages follow the written ones."""


class PageTableView(NamedTuple):
    """A page table on the host, printed as text and as HTML."""

    slots: tuple[SlotPages, ...]
    """The occupied slots."""
    page_size: int
    """Tokens of a page (the block size in vLLM)."""
    num_pages: int
    """Pages of the pool."""

    @property
    def num_uses(self) -> collections.Counter[int]:
        """Number of slots that use each page, by page id."""
        return collections.Counter(x for slot in self.slots for x in slot.page_ids)

    @property
    def title(self) -> str:
        """One line with the numbers of used and of shared pages."""
        uses = self.num_uses
        shared = sum(num > 1 for num in uses.values())
        return (
            f"{len(uses)} of {self.num_pages} pages of {self.page_size} tokens in use, "
            f"{shared} shared"
        )

    def __str__(self) -> str:
        """Returns a line per slot, with a star after each shared page."""
        uses = self.num_uses
        lines = [self.title]
        if self.slots:
            lines.append("slot  request  sample  tokens  pages")
        for slot in self.slots:
            pages = [f"{x}*" if uses[x] > 1 else f"{x}" for x in slot.page_ids]
            hidden = len(pages) - _MAX_LISTED_PAGES
            more = f" ... {hidden} more" if hidden > 0 else ""
            lines.append(
                f"{slot.slot:4}  {slot.request_id:7}  {slot.sample:6}  "
                f"{slot.num_tokens:6}  {' '.join(pages[:_MAX_LISTED_PAGES])}{more}"
            )
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Returns a table for notebooks, with shared pages in bold."""
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
    """Pages to copy before the next write (copy-on-write)."""

    source: Int32[Array, " slots"]
    """Shared page that each slot mapped before, or `NO_PAGE`."""
    target: Int32[Array, " slots"]
    """New page that the slot maps instead, or `NO_PAGE`."""


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


@validation.checks_numbers()
def num_pages(table: Table, *, page_size: int) -> Int32[Array, " slots"]:
    """Returns the number of pages of each slot."""
    return demand.pages_for(table.length + table.ahead, page_size=page_size)


@validation.checks_numbers()
def needs_copy(
    pool: Pool, table: Table, num_rows: Int32[Array, " slots"], *, page_size: int
) -> Bool[Array, " slots"]:
    """Returns the slots whose next write needs a copy of the last page (copy-on-write).

    Each copy takes one page in addition to those that `reserve` appends. If several
    slots will write to a page, all of them copy it if a further use remains; otherwise
    all but the last slot copy it, and that one writes in place. A slot that turns out
    not to write therefore never raises the number of copies. `num_rows` is the number
    of tokens that each slot will write from its length on; a slot with none, or a
    negative number, needs no copy.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    page = _written_page(table, num_rows, page_size)
    # Shapes [earlier writers, slots]: the sum over the leading axis is the faster one.
    slot = jnp.arange(page.shape[0], dtype=jnp.int32)
    before = (page[:, None] == page[None, :]) & (slot[:, None] < slot[None, :])
    rank = jnp.sum(before, axis=0, dtype=jnp.int32)
    return rank < arrays.take(pool.ref, page, fill=0) - 1


@validation.checks_numbers()
def is_shared(
    pool: Pool, table: Table, num_rows: Int32[Array, " slots"], *, page_size: int
) -> Bool[Array, " slots"]:
    """Returns the slots whose next write is to a shared page.

    If no slot does, `needs_copy` is False everywhere. Arguments are those of
    `needs_copy`.
    """
    page = _written_page(table, num_rows, page_size)
    return arrays.take(pool.ref, page, fill=0) > 1


@validation.checks_numbers()
def num_new_pages(
    pool: Pool,
    table: Table,
    places: Int32[Array, " slots"],
    num_rows: Int32[Array, " slots"],
    *,
    page_size: int,
) -> Int32[Array, ""]:
    """Returns the number of free pages that `reserve` would take, copies included."""
    growth = _growth(table, places, page_size)
    copies = needs_copy(pool, table, num_rows, page_size=page_size)
    return jnp.sum(growth + copies.astype(jnp.int32), dtype=jnp.int32)


@validation.checks_numbers()
def reserve(
    pool: Pool,
    table: Table,
    places: Int32[Array, " slots"],
    num_rows: Int32[Array, " slots"] | None = None,
    *,
    page_size: int,
    max_new_pages: int,
) -> tuple[Pool, Table, Copies, Bool[Array, ""]]:
    """Appends pages to slots, and replaces shared pages that they will write to.

    A slot whose next write is to a shared last page maps a new page instead (see
    `needs_copy`), and the caller copies the content first. Later pages are never shared
    by `page_sharing.fork`. They may be shared after `page_sharing.reorder` with
    reserved places, and then stay shared, which `invariants.shared_writes` detects.

    Args:
      pool: the pool to take pages from.
      table: the slots to extend.
      places: token places that each slot needs, written ones included. A slot that has
        them already is unchanged, so 0 means no request.
      num_rows: number of tokens that each slot will write from its length on; None
        copies no pages, for tables whose slots share full pages only.
      page_size: token places in a page, static.
      max_new_pages: largest number of pages that one call appends to a slot, static.

    Returns:
      The new pool and table, in which the new places are part of `ahead`; the pages to
      copy; and True if all slots were served. If the pool has too few pages, or a slot
      would exceed `max_new_pages` or its row, pool and table are unchanged and there
      are no pages to copy.

    Raises:
      ValueError: `max_new_pages` is below 1.

    Source: Kwon et al. 2023, arXiv:2309.06180, sections 4.3 and 4.4.
    """
    pages_per_slot = table.page_ids.shape[1]
    have = num_pages(table, page_size=page_size)
    growth = _growth(table, places, page_size)
    parts = jnp.zeros(have.shape, bool)
    if num_rows is not None:
        parts = needs_copy(pool, table, num_rows, page_size=page_size)
    fits = (have + growth <= pages_per_slot) & (growth <= max_new_pages)
    # The copy is the first of a slot's new pages.
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
    """Empties the masked slots and releases their pages."""
    rows = jnp.where(mask[:, None], table.page_ids, NO_PAGE)
    return page_pool.release(pool, rows), clear_slots(table, mask)


def clear_slots(table: Table, mask: Bool[Array, " slots"]) -> Table:
    """Returns the table with empty masked slots, whose pages the caller releases."""
    return Table(
        page_ids=jnp.where(mask[:, None], NO_PAGE, table.page_ids),
        length=jnp.where(mask, 0, table.length),
        ahead=jnp.where(mask, 0, table.ahead),
        evicted=None if table.evicted is None else jnp.where(mask, 0, table.evicted),
    )


def advance_lengths(table: Table, accepted: Int32[Array, " slots"]) -> Table:
    """Moves `accepted` reserved places of each slot, in [0, ahead], to its length.

    A larger number makes `ahead` negative, which `invariants.violations` detects.
    """
    return table._replace(length=table.length + accepted, ahead=table.ahead - accepted)


@validation.checks_numbers()
def truncate(
    pool: Pool, table: Table, places: Int32[Array, " slots"], *, page_size: int
) -> tuple[Pool, Table]:
    """Releases reserved places beyond `places`, and the pages that hold only these.

    A slot with fewer places is unchanged, and `length` is never reduced. K and V in the
    released places are not cleared.
    """
    keep = jnp.clip(places - table.length, 0, table.ahead)
    shorter = table._replace(ahead=keep)
    place = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    beyond = place >= num_pages(shorter, page_size=page_size)[:, None]
    pool = page_pool.release(pool, jnp.where(beyond, table.page_ids, NO_PAGE))
    page_ids = jnp.where(beyond, NO_PAGE, table.page_ids)
    return pool, shorter._replace(page_ids=page_ids)


def _growth(table: Table, places: Array, page_size: int) -> Array:
    """Returns the pages that each slot lacks for its places."""
    have = table.length + table.ahead
    return demand.missing_pages(have, places, page_size=page_size)


def _column(table: Table, page_size: int) -> Array:
    """Returns the column of each slot's next write."""
    return table.length // page_size


def _written_page(table: Table, num_rows: Array, page_size: int) -> Array:
    """Returns the page of each slot's next write, `NO_PAGE` if it writes no rows."""
    column = jnp.where(num_rows > 0, _column(table, page_size), NO_PAGE)
    return _page_at(table.page_ids, column)


def _page_at(page_ids: Array, column: Array) -> Array:
    """Returns the page in one column of each row, `NO_PAGE` for an invalid column."""
    num_slots, num_columns = page_ids.shape
    first = jnp.arange(num_slots, dtype=jnp.int32) * num_columns
    is_in_table = (column >= 0) & (column < num_columns)
    place = jnp.where(is_in_table, first + column, NO_PAGE)
    return arrays.take(page_ids.reshape(-1), place, fill=NO_PAGE)


def move_slots(table: Table, source: Int32[Array, " slots"]) -> Table:
    """Moves the rows of slots: each one gets the row of `source`, or is empty at -1.

    Every row that is not empty must be the source of one slot.
    """
    return Table(
        page_ids=arrays.take(table.page_ids, source, fill=NO_PAGE),
        length=arrays.take(table.length, source, fill=0),
        ahead=arrays.take(table.ahead, source, fill=0),
        evicted=None
        if table.evicted is None
        else arrays.take(table.evicted, source, fill=0),
    )
