"""Pages of layers with a sliding window, which return to their pool behind the window.

These layers have K and V arrays, page ids and a pool of their own, since no token reads
keys behind its window, while layers without a window read all. The pages of a slot are
in the columns of a second page table: a column behind the window is `NO_PAGE` again.
Lengths are those of the first table, and nothing is reserved ahead of a step.

A free page keeps its content until it is allocated again, and pages are allocated in
the order in which they became free, of those of one call the last column first. So a
page stays the checkpoint of its page in the prefix cache, see `checkpoints`, and a
request that starts there takes it back.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory import page_pool, page_sharing, page_table
from jaxkv.memory.demand import first_window_page, pages_for
from jaxkv.memory.page_pool import NO_PAGE, Pool, make_pool
from jaxkv.memory.page_table import Copies, Table
from jaxkv.memory.prefixes import (
    PrefixCache,
    checkpoint_of,
    entry_tick,
    new_checkpoints,
)


class WindowPool(NamedTuple):
    """Uses of the pages of layers with a window."""

    pool: Pool
    page_ids: Int32[Array, "slots pages_per_slot"]
    """Page of each run of `page_size` tokens; `NO_PAGE` behind the window."""
    of_sequence: Int32[Array, "sequences pages_per_slot"]
    """These pages of each swapped-out sequence, which stay where they are."""
    page: Int32[Array, " window_pages"]
    """As in `Checkpoints`."""
    entered: Int32[Array, " window_pages"]
    """As in `Checkpoints`."""
    of_page: Int32[Array, " pages"]
    """As in `Checkpoints`."""


@validation.checks_numbers()
def make_window_pool(
    num_window_pages: int, *, num_sequences: int, num_pages: int, table: Table
) -> WindowPool:
    """Makes a pool in which every page is free; sizes are at least 1.

    `table` is the first page table, with `num_pages` pages.
    """

    def none(*shape: int) -> Array:
        return jnp.full(shape, NO_PAGE, jnp.int32)

    return WindowPool(
        pool=make_pool(num_window_pages),
        page_ids=none(*table.page_ids.shape),
        of_sequence=none(num_sequences, table.page_ids.shape[1]),
        page=none(num_window_pages),
        entered=jnp.zeros((num_window_pages,), jnp.int32),
        of_page=none(num_pages),
    )


def window_table(windows: WindowPool, table: Table) -> Table:
    """Returns the second page table, with the lengths of the first one."""
    return Table(windows.page_ids, table.length, jnp.zeros_like(table.ahead))


@validation.checks_numbers()
def map_window_pages(
    windows: WindowPool,
    table: Table,
    num_rows: Int32[Array, " slots"],
    *,
    page_size: int,
) -> tuple[WindowPool, Copies]:
    """Maps the pages that a step writes; the caller makes the copies first.

    The pool must have enough pages, see `demand.max_window_pages`; else none is mapped,
    which `invariants.shared_writes` detects.
    """
    before = window_table(windows, table)
    pool, after, copies, _ = page_table.reserve(
        windows.pool,
        before,
        jnp.where(num_rows > 0, table.length + num_rows, 0),
        num_rows,
        page_size=page_size,
        max_new_pages=before.page_ids.shape[1],
    )
    new = jnp.where(after.page_ids != before.page_ids, after.page_ids, NO_PAGE)
    page = arrays.put(windows.page, new, NO_PAGE)
    return windows._replace(pool=pool, page_ids=after.page_ids, page=page), copies


@validation.checks_numbers()
def trim_window_pages(
    windows: WindowPool, table: Table, *, window: int, page_size: int
) -> WindowPool:
    """Releases the pages that no later token reads.

    These are the pages behind the window of the next token, and pages of rejected
    drafts only.
    """
    first = first_window_page(table.length, window=window, page_size=page_size)
    end = pages_for(table.length, page_size=page_size)
    column = jnp.arange(windows.page_ids.shape[1], dtype=jnp.int32)[None, :]
    stays = (column >= first[:, None]) & (column < end[:, None])
    left = jnp.where(stays, NO_PAGE, windows.page_ids)

    def release(windows: WindowPool, left: Array) -> WindowPool:
        pool = release_last(windows.pool, left)
        page_ids = jnp.where(left == NO_PAGE, windows.page_ids, NO_PAGE)
        return windows._replace(pool=pool, page_ids=page_ids)

    return arrays.update_if(jnp.any(left != NO_PAGE), release, windows, left)


def release_last(pool: Pool, page_ids: Int32[Array, "..."]) -> Pool:
    """Releases pages as `page_pool.release`; all other free pages are allocated first.

    The cost grows with the pool.
    """
    after = page_pool.release(pool, page_ids)
    num_new = after.num_free - pool.num_free
    place = jnp.arange(pool.stack.shape[0], dtype=jnp.int32)
    source = jnp.where(place < num_new, pool.num_free + place, place - num_new)
    source = jnp.where(place < after.num_free, source, place)
    return after._replace(stack=after.stack[source])


def drop_window_slots(windows: WindowPool, mask: Bool[Array, " slots"]) -> WindowPool:
    """Empties masked slots and releases their pages."""
    left = jnp.where(mask[:, None], windows.page_ids, NO_PAGE)
    page_ids = jnp.where(mask[:, None], NO_PAGE, windows.page_ids)
    return windows._replace(pool=release_last(windows.pool, left), page_ids=page_ids)


def continue_window_slots(
    windows: WindowPool, table: Table, source: Int32[Array, " slots"]
) -> WindowPool:
    """Makes slots share the pages of other slots, as `page_sharing.reorder`.

    `table` has the lengths before the change.
    """
    before = window_table(windows, table)
    pool, after = page_sharing.reorder(windows.pool, before, source)
    return windows._replace(pool=pool, page_ids=after.page_ids)


def attach_window_pages(
    windows: WindowPool, cache: PrefixCache, page_ids: Int32[Array, "slots columns"]
) -> WindowPool:
    """Makes the pages of slots the checkpoints of cached pages in the same columns.

    `page_ids` are these pages of each slot; columns with `NO_PAGE` are skipped.
    """
    pages, entries = new_checkpoints(
        windows, cache, page_ids.reshape(-1), windows.page_ids.reshape(-1)
    )
    of_page = arrays.put(windows.of_page, pages, NO_PAGE)
    return windows._replace(
        page=arrays.put(windows.page, entries, pages),
        entered=arrays.put(windows.entered, entries, entry_tick(cache, pages)),
        of_page=arrays.put(of_page, pages, entries, "max"),
    )


@validation.checks_numbers()
def window_pages_of(
    windows: WindowPool,
    cache: PrefixCache,
    page_ids: Int32[Array, "n pages_per_slot"],
    *,
    window: int,
    page_size: int,
) -> tuple[Int32[Array, "n pages_per_slot"], Int32[Array, "n pages_per_slot"]]:
    """Returns cached prefixes up to the last page where a sequence can continue.

    It can continue where the pages of its whole window are checkpoints.

    Args:
      windows: the pool.
      cache: the prefix cache.
      page_ids: cached pages of the first tokens of sequences, then `NO_PAGE`.
      window: the window in tokens.
      page_size: tokens in a page.

    Returns:
      The cached pages, and the pages of the windows at their ends.
    """
    num_columns = page_ids.shape[1]
    column = jnp.arange(num_columns, dtype=jnp.int32)[None, :]
    checkpoints = checkpoint_of(windows, cache, page_ids)
    missing = jnp.where(checkpoints == NO_PAGE, column, -1)
    # Without a column from `last_missing` on, all pages after it are there.
    last_missing = jnp.maximum.accumulate(missing, axis=1)
    first = first_window_page(
        (column + 1) * page_size, window=window, page_size=page_size
    )
    has_window = (checkpoints != NO_PAGE) & (last_missing < first)
    ends_here = (page_ids != NO_PAGE) & has_window
    num = jnp.max(jnp.where(ends_here, column + 1, 0), axis=1, keepdims=True)
    first = first_window_page(num * page_size, window=window, page_size=page_size)
    within = column < num
    return (
        jnp.where(within, page_ids, NO_PAGE),
        jnp.where(within & (column >= first), checkpoints, NO_PAGE),
    )


def start_on_window_pages(
    windows: WindowPool,
    page_ids: Int32[Array, "n pages_per_slot"],
    slot: Int32[Array, " n"],
) -> WindowPool:
    """Makes slots continue from checkpoints, free or in use; -1 skips a row."""
    page_ids = jnp.where((slot >= 0)[:, None], page_ids, NO_PAGE)

    def start(windows: WindowPool, page_ids: Array) -> WindowPool:
        pool = page_pool.share(windows.pool, page_ids)
        place = jnp.arange(pool.stack.shape[0], dtype=jnp.int32)
        stays = (place < pool.num_free) & (pool.ref[pool.stack] == 0)
        order = arrays.marked_indices(stays, place.shape[0])
        pool = pool._replace(
            stack=arrays.take(pool.stack, order, fill=0),
            num_free=jnp.sum(stays, dtype=jnp.int32),
        )
        ids = arrays.put(windows.page_ids, slot, page_ids)
        return windows._replace(pool=pool, page_ids=ids)

    return arrays.update_if(jnp.any(page_ids != NO_PAGE), start, windows, page_ids)


def release_swapped_windows(
    windows: WindowPool, mask: Bool[Array, " sequences"]
) -> WindowPool:
    """Releases the pages of masked sequences that are swapped out."""
    left = jnp.where(mask[:, None], windows.of_sequence, NO_PAGE)
    return windows._replace(
        pool=release_last(windows.pool, left),
        of_sequence=jnp.where(mask[:, None], NO_PAGE, windows.of_sequence),
    )
