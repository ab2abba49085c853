"""Slots of one request: forked from each other, continuing each other, sharing pages.

Pages are shared by counting uses; whoever writes to a shared one gets a copy first, see
`page_table.reserve`. Slots of one group share pages only in the same column, since
whatever a slot takes over from another one, it takes in its place.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.memory import page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table, num_pages


def fork(
    pool: Pool, table: Table, source: Int32[Array, " slots"], *, page_size: int
) -> tuple[Pool, Table]:
    """Makes slots copies of other slots, by sharing every page that is written.

    `source` is the slot that each one becomes a copy of, or -1 to leave it; all are
    read before any slot changes. A slot that becomes a copy must be empty; if it is
    not, its pages stay counted as used, which `invariants.violations` shows. The last
    page may be partial: it is shared as well, and parted by `reserve` before one of its
    owners writes to it. Places reserved ahead stay with the source.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    copied = source >= 0
    after = _follow(table, source)
    after = after._replace(ahead=jnp.where(copied, 0, after.ahead))
    place = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    beyond = place >= num_pages(after, page_size=page_size)[:, None]
    page_ids = jnp.where(copied[:, None] & beyond, NO_PAGE, after.page_ids)
    pool = page_pool.share(pool, jnp.where(copied[:, None], page_ids, NO_PAGE))
    return pool, after._replace(page_ids=page_ids)


def reorder(
    pool: Pool, table: Table, source: Int32[Array, " slots"]
) -> tuple[Pool, Table]:
    """Makes slots continue other slots instead of themselves: the beams of a group.

    `source` is the slot that each one continues, or -1 to leave it; all are read before
    any slot changes, several may continue the same one, and what continues an empty
    slot becomes empty. A page's count changes by its uses after less its uses before: a
    page that a slot keeps in place is not touched, and one that no slot continues is
    released once. Last pages are shared, as by `fork`.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    after = _follow(table, source)
    changed = after.page_ids != table.page_ids
    # Gains go first: a page that only moves must not reach zero on its way.
    pool = page_pool.share(pool, jnp.where(changed, after.page_ids, NO_PAGE))
    return page_pool.release(pool, jnp.where(changed, table.page_ids, NO_PAGE)), after


def holders(
    table: Table, group: Int32[Array, " slots"]
) -> Int32[Array, "slots pages_per_slot"]:
    """Finds for each page of a slot the lowest slot of its group that maps it, too.

    `group` is a number of each slot's group, below 0 for a slot that has none. What is
    found means nothing where no page is mapped. Slots of one group share pages only in
    the same column, as `fork` and `reorder` leave them. Costs nothing like a search: as
    many passes over the table as the largest group has slots beside one, so none where
    every sequence is alone.
    """
    slot = jnp.arange(group.shape[0], dtype=jnp.int32)
    before = (group[:, None] == group[None, :]) & (slot[:, None] < slot[None, :])
    before &= (group >= 0)[None, :]
    nearest = jnp.max(jnp.where(before, slot[:, None], -1), axis=0)

    def any_left(carry: tuple[Array, Array]) -> Array:
        return jnp.any(carry[0] >= 0)

    def compare(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        other, holder = carry
        theirs = arrays.take(table.page_ids, other, fill=NO_PAGE)
        same = (table.page_ids == theirs) & (other >= 0)[:, None]
        holder = jnp.where(same, other[:, None], holder)
        return arrays.take(nearest, other, fill=-1), holder

    alone = jnp.broadcast_to(slot[:, None], table.page_ids.shape)
    return lax.while_loop(any_left, compare, (nearest, alone))[1]


def owned_pages(
    table: Table,
    holder: Int32[Array, "slots pages_per_slot"],
    *,
    pinned: Bool[Array, "slots pages_per_slot"] | None = None,
) -> Int32[Array, " slots"]:
    """Counts the pages that each slot accounts for: a group's shared ones once.

    They count in the lowest slot that maps them, the `holder` of each, see `holders`.
    Pinned pages, those of a use outside the table, count for nobody, since dropping
    the group would not free them. Groups share pinned pages only, so the sum over a
    group is what dropping all of it would free.
    """
    slot = jnp.arange(holder.shape[0], dtype=jnp.int32)[:, None]
    owned = (table.page_ids != NO_PAGE) & (holder == slot)
    if pinned is not None:
        owned &= ~pinned
    return jnp.sum(owned, axis=1, dtype=jnp.int32)


def _follow(table: Table, source: Array) -> Table:
    """The table with slots replaced by their sources, all read as they are now."""
    moved = source >= 0
    ids = arrays.take(table.page_ids, source, fill=NO_PAGE)
    length = arrays.take(table.length, source, fill=0)
    ahead = arrays.take(table.ahead, source, fill=0)
    return Table(
        page_ids=jnp.where(moved[:, None], ids, table.page_ids),
        length=jnp.where(moved, length, table.length),
        ahead=jnp.where(moved, ahead, table.ahead),
    )
