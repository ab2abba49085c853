"""Page sharing between the slots of a request: fork and beam reordering.

Shared pages have a reference count above one; a slot copies a shared page before it
writes to it (copy-on-write), see `page_table.reserve`. Slots of one group share a page
only in the same column, since a slot takes over pages in their columns.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory import page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table, num_pages


@validation.checks_numbers()
def fork(
    pool: Pool, table: Table, source: Int32[Array, " slots"], *, page_size: int
) -> tuple[Pool, Table]:
    """Makes slots copies of other slots, by sharing all pages with written tokens.

    `source` is the slot that each slot becomes a copy of, or -1 for no change; all
    sources are read before any slot changes. A slot that becomes a copy must be empty:
    otherwise its pages stay counted, which `invariants.violations` detects. A partial
    last page is shared too, and `reserve` copies it before a slot writes to it.
    Reserved places stay with the source.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    copied = source >= 0
    after = _copy_slots(table, source)
    after = after._replace(ahead=jnp.where(copied, 0, after.ahead))
    place = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    beyond = place >= num_pages(after, page_size=page_size)[:, None]
    page_ids = jnp.where(copied[:, None] & beyond, NO_PAGE, after.page_ids)
    pool = page_pool.share(pool, jnp.where(copied[:, None], page_ids, NO_PAGE))
    return pool, after._replace(page_ids=page_ids)


def reorder(
    pool: Pool, table: Table, source: Int32[Array, " slots"]
) -> tuple[Pool, Table]:
    """Makes slots continue other slots: the beams of a group.

    `source` is the slot that each slot continues, or -1 for no change; all sources are
    read before any slot changes, several slots may continue the same one, and a slot
    that continues an empty slot becomes empty. The count of a page changes by the
    difference of its uses: a page that a slot keeps in place is not touched, and a page
    that no slot continues is released once. Last pages are shared, as by `fork`.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    after = _copy_slots(table, source)
    changed = after.page_ids != table.page_ids
    # Uses are added first: a page that only moves must not reach a count of zero.
    pool = page_pool.share(pool, jnp.where(changed, after.page_ids, NO_PAGE))
    return page_pool.release(pool, jnp.where(changed, table.page_ids, NO_PAGE)), after


def holders(
    table: Table, group: Int32[Array, " slots"]
) -> Int32[Array, "slots pages_per_slot"]:
    """Returns for each page of a slot the lowest slot of its group that maps it.

    `group` is the number of each slot's group, negative for a slot without a group. The
    result is undefined where no page is mapped. Slots of one group share pages only in
    the same column, as `fork` and `reorder` leave them. The table is read once per slot
    of the largest group after its first slot, so a group of one slot costs no pass.
    """
    slot = jnp.arange(group.shape[0], dtype=jnp.int32)
    before = (group[:, None] == group[None, :]) & (slot[:, None] < slot[None, :])
    before &= (group >= 0)[None, :]
    nearest = jnp.max(jnp.where(before, slot[:, None], -1), axis=0)

    def any_left(carry: tuple[Array, Array]) -> Array:
        return jnp.any(carry[0] >= 0)

    def compare(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        other, holder = carry
        other_ids = arrays.take(table.page_ids, other, fill=NO_PAGE)
        same = (table.page_ids == other_ids) & (other >= 0)[:, None]
        holder = jnp.where(same, other[:, None], holder)
        return arrays.take(nearest, other, fill=-1), holder

    slot_index = jnp.broadcast_to(slot[:, None], table.page_ids.shape)
    return lax.while_loop(any_left, compare, (nearest, slot_index))[1]


def owned_pages(
    table: Table,
    holder: Int32[Array, "slots pages_per_slot"],
    *,
    pinned: Bool[Array, "slots pages_per_slot"] | None = None,
) -> Int32[Array, " slots"]:
    """Counts the pages that each slot accounts for; shared pages of a group count once.

    A shared page counts in the lowest slot that maps it, its `holder`, see `holders`.
    Pinned pages, which have a use outside the table, are not counted, since dropping
    the group would not free them. Groups share only pinned pages with each other, so
    the sum over a group is the number of pages that dropping the group frees.
    """
    slot = jnp.arange(holder.shape[0], dtype=jnp.int32)[:, None]
    owned = (table.page_ids != NO_PAGE) & (holder == slot)
    if pinned is not None:
        owned &= ~pinned
    return jnp.sum(owned, axis=1, dtype=jnp.int32)


def _copy_slots(table: Table, source: Array) -> Table:
    """Returns the table with slots replaced by their sources."""
    moved = source >= 0
    ids = arrays.take(table.page_ids, source, fill=NO_PAGE)
    length = arrays.take(table.length, source, fill=0)
    ahead = arrays.take(table.ahead, source, fill=0)
    return Table(
        page_ids=jnp.where(moved[:, None], ids, table.page_ids),
        length=jnp.where(moved, length, table.length),
        ahead=jnp.where(moved, ahead, table.ahead),
        evicted=table.evicted,  # slots with evicted tokens share no pages
    )
