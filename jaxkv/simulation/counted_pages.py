"""Counted pages: token places that sequences hold in a simulation, without page ids.

Sequences of one request share the pages of their common tokens, see `ledger.Fork`. The
last of these pages may be partial, and is shared until a sequence writes to it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.ledger import Groups, Slots, is_occupied, is_running
from jaxkv.memory import first_window_page, pages_for


class CountedPages(NamedTuple):
    """Token places of the slots."""

    length: Int32[Array, "*n"]
    """Tokens whose K and V are written."""
    places: Int32[Array, "*n"]
    """Token places held: `length`, and those reserved ahead."""
    block: Int32[Array, "*n"] | None
    """First leaf of the contiguous block; None without a contiguous reservation."""


class MemoryBreakdown(NamedTuple):
    """Token places of the pages in use, by their use.

    All remaining places are external: free, or beyond the reserved places of a
    contiguous block.
    """

    tokens: Int32[Array, ""]
    """Places with K and V of running sequences; shared places count once."""
    reserved: Int32[Array, ""]
    """Empty places that will be written before the sequence ends."""
    internal: Int32[Array, ""]
    """Places that stay empty (internal fragmentation)."""


def num_owned(
    slots: Slots,
    length: Int32[Array, " slots"],
    group: Groups | None,
    places: Int32[Array, " slots"],
    page_size: Int32[Array, ""],
) -> tuple[Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Counts the pages of `places` that each sequence accounts for.

    A page that a group shares counts once: a full page for the first sequence of the
    group, a partial page for the first of those that have not written since the fork.

    Returns:
      The counts, and the pages of each sequence that earlier ones account for.
    """
    pages = pages_for(places, page_size=page_size)
    if slots.fork is None or group is None:
        return pages, jnp.zeros_like(pages)
    shares = _shares(slots)
    joint = _is_joint(slots, length, page_size)
    full = jnp.where(shares & ~group.is_first, slots.fork.num_common // page_size, 0)
    num_shared = full + (joint & (group.before(joint) > 0)).astype(jnp.int32)
    return pages - num_shared, num_shared


def num_copies(
    slots: Slots,
    length: Int32[Array, " slots"],
    group: Groups | None,
    wants: Int32[Array, " slots"],
    page_size: Int32[Array, ""],
) -> Int32[Array, " slots"]:
    """Counts the pages that each sequence copies before it writes `wants` tokens.

    The count is 0 or 1. Of the sequences that share a page, the last one to write needs
    no copy, see `page_table.needs_copy`.
    """
    if group is None:
        return jnp.zeros_like(wants)
    joint = _is_joint(slots, length, page_size)
    writes = joint & (wants > 0)
    owners = group.total(joint.astype(jnp.int32))
    return (writes & (group.before(writes) < owners - 1)).astype(jnp.int32)


def num_window_pages(
    slots: Slots,
    length: Int32[Array, " slots"],
    group: Groups | None,
    window: Int32[Array, ""],
    page_size: Int32[Array, ""],
) -> Int32[Array, ""]:
    """Counts the pages of layers with a window that return behind it.

    These are the pages of written tokens that the next token of each sequence reads.
    The common pages of a group count once, from the first that any sequence reads.
    """
    first = first_window_page(length, window=window, page_size=page_size)
    num = pages_for(length, page_size=page_size) - first
    if slots.fork is None or group is None:
        return jnp.sum(jnp.where(is_occupied(slots), num, 0), dtype=jnp.int32)
    common = jnp.where(_shares(slots), slots.fork.num_common // page_size, 0)
    common = jnp.where(is_occupied(slots), jnp.maximum(common - first, 0), 0)
    joint = _is_joint(slots, length, page_size)
    joint &= group.before(joint) > 0
    num_own = jnp.where(is_occupied(slots), num - common - joint.astype(jnp.int32), 0)
    shared = jnp.where(
        group.is_first, arrays.reduce_groups(common, group.first, "max"), 0
    )
    return jnp.sum(num_own + shared, dtype=jnp.int32)


def break_down(
    slots: Slots,
    pages: CountedPages,
    group: Groups | None,
    limit: Int32[Array, " slots"],
    page_size: Int32[Array, ""],
    num_reserved: Int32[Array, " slots"] | None = None,
) -> tuple[MemoryBreakdown, Int32[Array, ""]]:
    """Divides the token places of all pages in use by their use.

    Args:
      slots: the running batch.
      pages: token places of the slots.
      group: groups of the slots.
      limit: length of prompt plus answer; the last token is never written.
      page_size: tokens per page.
      num_reserved: places reserved for each sequence, if its block may be larger; else
        None.

    Returns:
      The places, and the number of pages saved by sharing.
    """
    owned, num_shared = num_owned(slots, pages.length, group, pages.places, page_size)
    runs = is_running(slots)
    before = num_shared * page_size
    num_places = jnp.where(slots.sequence >= 0, owned * page_size, 0)
    if num_reserved is not None:
        num_places = jnp.minimum(num_places, num_reserved)

    def within(tokens: Array) -> Array:
        """Counts the first `tokens` of each sequence on pages that it accounts for."""
        return jnp.where(runs, jnp.clip(tokens - before, 0, num_places), 0)

    tokens = within(pages.length)
    useful = within(jnp.maximum(limit - 1, pages.length))
    return MemoryBreakdown(
        tokens=jnp.sum(tokens, dtype=jnp.int32),
        reserved=jnp.sum(useful - tokens, dtype=jnp.int32),
        internal=jnp.sum(num_places - useful, dtype=jnp.int32),
    ), jnp.sum(jnp.where(slots.sequence >= 0, num_shared, 0), dtype=jnp.int32)


def _shares(slots: Slots) -> Bool[Array, " slots"]:
    """Returns the sequences that were forked or forked from."""
    fork = slots.fork
    assert fork is not None
    return (fork.num_common > 0) & ~fork.reads & ~fork.waits


def _is_joint(
    slots: Slots, length: Int32[Array, " slots"], page_size: Int32[Array, ""]
) -> Bool[Array, " slots"]:
    """Returns the sequences that share a partial last page.

    These are the ones that have not written since the fork.
    """
    fork = slots.fork
    assert fork is not None
    shares = _shares(slots) & (length == fork.num_common)
    return shares & (fork.num_common % page_size > 0)
