"""Pages of all layers together: their leaves, the rows written to them, page copies.

Leaves. Every leaf of `Pages` begins with `[layers, pages, heads, page_size]`; a page id
means token places and is shared by all leaves. So whatever copies, moves, swaps or
sends pages maps over the leaves. Their content is known to a `KVLayout` only, see
`kv_layout`. Inside a page the heads come before the tokens, so that one head's keys of
a page are contiguous.

In place. The pages are the largest thing in memory and must never be copied. Donate
them to the outermost `jit`, and carry them through loops: a `lax.scan` that takes them
as scanned input and returns them as scanned output copies them three times, and a
`lax.cond` around unrolled layers once more. Writes and kernels index the view of
`flatten_layers`, `[layers * pages, ...]`, through ids that `flat_ids` has offset by the
layer: neither ever slices a layer out.

Out of a pool and into it. `copy` goes from page to page on the device. Through the
memory of the host pages go by `gather_pages`, `to_host`, `pad_pages` and
`scatter_pages`: when requests are swapped out, when a prefix is sent to another worker,
and for snapshots.

Sentinels. `NO_PAGE` plus an offset would be the last page of another layer, so unmapped
places become an out-of-range id after the offset, never before.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxkv import arrays
from jaxkv.memory import page_parts
from jaxkv.memory.page_pool import NO_PAGE
from pallas_kernels.layered import flat_ids
from pallas_kernels.page_ops.copy import copy_pages

if TYPE_CHECKING:
    from jaxkv.memory.kv_layout import KVLayout

_COPIES_AT_ONCE = 16
"""Pages that `copy` holds outside the pool at one time, all layers of each."""


class Pages(NamedTuple):
    """Keys and values of every page. Sizes are read from the shapes.

    `k` and `v` are for the layout alone; other code goes through its functions.
    """

    k: Any
    """Keys, positions already encoded in them: an array, or a tree of arrays such as a
    `Quantized`."""
    v: Any
    """Values of the same tokens, without positions; None in a layout whose values are
    part of the keys."""
    layout: "KVLayout"
    """Meaning of both: no leaf, but part of the tree's structure."""
    beside: "Pages | None" = None
    """K and V of a model that runs beside this one, such as a drafter's: the same pages
    of it, so that they are copied, swapped and shared together."""
    features: Float[Array, "1 pages 2 page_size half"] | None = None
    """What the model made of each token, for heads that draft; see `memory.features`.
    They lie like K or V of one layer with two heads, half of them each, and go where
    these go. (In an axis of one XLA sees no order, and copies.)"""

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers that hold the keys."""
        return jax.tree.leaves(self.k)[0].dtype

    @property
    def num_layers(self) -> int:
        """Layers that write here."""
        return self._shape[0]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, each with K and V of all layers."""
        return self._shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this device."""
        return self._shape[2]

    @property
    def page_size(self) -> int:
        """Token places in a page, on all devices that have a part of it."""
        return self.part * page_parts.degree()

    @property
    def part(self) -> int:
        """Token places of a page on this device, see `page_parts`."""
        return self._shape[3]

    @property
    def _shape(self) -> tuple[int, ...]:
        return jax.tree.leaves(self.k)[0].shape


class Rows(NamedTuple):
    """The packed rows of one step: one token each, of any mix of sequences."""

    token: Int32[Array, " rows"]
    """Token id to feed."""
    position: Int32[Array, " rows"]
    """Position in its sequence, from 0, that is encoded; -1 on a padding row."""
    slot: Int32[Array, " rows"] | None
    """Slot of its sequence. None where all slots have as many rows, in their order."""
    page_ids: Int32[Array, "slots pages_per_slot"]
    """The page table, which already maps the places that the rows write to."""
    logit_rows: Int32[Array, " logit_rows"]
    """Index of every row whose logits are wanted; -1 where unused."""
    place: Int32[Array, " rows"] | None = None
    """Token place where K and V are written, -1 on a padding row; None where it is the
    position. In a token tree branches stand side by side, not one behind another."""
    context: Int32[Array, " slots"] | None = None
    """Places that all rows of a slot with a token tree see; -1 of other slots."""
    ancestors: Bool[Array, "rows columns"] | None = None
    """Whether each row sees place `context + column`, too, that of itself among them:
    its ancestors in the tree. Given with `context`."""

    @property
    def places(self) -> Int32[Array, " rows"]:
        """Token place of each row, -1 on a padding row."""
        return self.position if self.place is None else self.place


def locate(
    rows: Rows, *, page_size: int
) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """Finds the page and the offset inside it where each row's K and V belong.

    Returns:
      Page ids, `NO_PAGE` on padding rows, where the table maps nothing, and where
      another device has that part of the page; and offsets in the part that is here,
      without meaning where the page is `NO_PAGE`.

    Raises:
      ValueError: `rows.slot` is None and there are not as many rows as slots.
    """
    return _where(rows.page_ids, slots_of(rows), rows.places, page_size)


def slots_of(rows: Rows) -> Int32[Array, " rows"]:
    """The slot of every row.

    Raises:
      ValueError: `rows.slot` is None and there are not as many rows as slots.
    """
    if rows.slot is not None:
        return rows.slot
    num_rows, num_slots = rows.position.shape[0], rows.page_ids.shape[0]
    if num_rows % num_slots:
        raise ValueError(
            f"{num_rows=} must be a multiple of {num_slots=} when slot is None"
        )
    return jnp.arange(num_rows, dtype=jnp.int32) // (num_rows // num_slots)


def _where(
    page_ids: Int32[Array, "slots pages_per_slot"],
    slot: Int32[Array, "*shape"],
    place: Int32[Array, "*shape"],
    page_size: int,
) -> tuple[Int32[Array, "*shape"], Int32[Array, "*shape"]]:
    # Place -1 gives column -1 of the table, which `arrays.take` treats as unmapped.
    page = arrays.take(page_ids, (slot, place // page_size), fill=NO_PAGE)
    if (num := page_parts.degree()) == 1:
        return page, place % page_size
    part = page_size // num
    offset = place % page_size - page_parts.first_offset(part)
    is_here = (offset >= 0) & (offset < part)
    return jnp.where(is_here, page, NO_PAGE), jnp.where(is_here, offset, 0)


def copy(
    pages: Pages,
    source: Int32[Array, " n"],
    target: Int32[Array, " n"],
    *,
    origin: Pages | None = None,
) -> Pages:
    """Copies pages to other pages, all layers of them, in place.

    Costs as much as the entries that name pages, next to nothing where none does, as in
    nearly every step. A few at a time pass through temporary memory.

    Args:
      pages: the pages, donated or carried.
      source: page that each entry reads; `NO_PAGE` does nothing.
      target: page that it overwrites, no page twice and none that is also a source;
        `NO_PAGE` does nothing.
      origin: other pages of the same model to read from; None reads from `pages`.

    Returns:
      The new pages.
    """
    size = min(source.shape[0], _COPIES_AT_ONCE)
    wanted = (source >= 0) & (target >= 0)

    def one_leaf(leaf: Array, read: Array, ids: list[Array]) -> Array:
        layers = jnp.arange(leaf.shape[0], dtype=jnp.int32)

        def every(of: Array, ids: Array) -> Array:
            sizes = {"num_layers": of.shape[0], "num_pages": of.shape[1]}
            offset = functools.partial(flat_ids, **sizes)
            return jax.vmap(offset, (None, 0))(ids, layers).reshape(-1)

        places = every(read, ids[0]), every(leaf, ids[1])
        origin = None if read is leaf else flatten_layers(read)
        copied = copy_pages(flatten_layers(leaf), *places, origin=origin, disjoint=True)
        return unflatten_layers(copied, leaf.shape)

    def every_one(pages: Pages, wanted: Array, *ids: Array) -> Pages:
        place = arrays.places(wanted, source.shape[0] + size)
        packed = [arrays.take(x, place, fill=NO_PAGE) for x in ids]

        def some(index: Array, pages: Pages) -> Pages:
            ids = [lax.dynamic_slice_in_dim(x, index * size, size) for x in packed]
            read = pages if origin is None else origin
            return jax.tree.map(lambda leaf, x: one_leaf(leaf, x, ids), pages, read)

        trips = (jnp.sum(wanted, dtype=jnp.int32) + size - 1) // size
        return lax.fori_loop(0, trips, some, pages)

    return arrays.when(jnp.any(wanted), every_one, pages, wanted, source, target)


def move(
    pages: Pages,
    page_ids: Int32[Array, "slots pages_per_slot"],
    source: Int32[Array, "slots n"],
    target: Int32[Array, "slots n"],
) -> Pages:
    """Moves what tokens wrote to other token places of their slots, in place.

    After a token tree is verified, the accepted path becomes contiguous. Costs next to
    nothing where no token moves.

    Args:
      pages: the pages, donated or carried; all layers and leaves of them.
      page_ids: the page table.
      source: token place that each entry reads.
      target: token place that it overwrites, none twice; -1 does nothing.

    Returns:
      The new pages.
    """
    slot = jnp.arange(source.shape[0], dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(slot, source.shape)
    moves = (target >= 0) & (target != source)

    def every_one(pages: Pages, moves: Array, source: Array, target: Array) -> Pages:
        places = (jnp.where(moves, x, -1) for x in (source, target))
        (read, at), (written, to) = (
            tuple(x.reshape(-1) for x in _where(page_ids, slot, place, pages.page_size))
            for place in places
        )

        def one_leaf(leaf: Array) -> Array:
            # A gather and a scatter of tokens; only as many as there are entries.
            page = jnp.where(written < 0, leaf.shape[1], written)
            found = leaf[:, jnp.maximum(read, 0), :, at]
            if page_parts.degree() > 1:
                has = jnp.expand_dims(read >= 0, tuple(range(1, found.ndim)))
                found = jnp.where(has, found, jnp.zeros_like(found))
                found = page_parts.broadcast_from_owner(found)
            return leaf.at[:, page, :, to].set(found, mode="drop")

        return jax.tree.map(one_leaf, pages)

    return arrays.when(jnp.any(moves), every_one, pages, moves, source, target)


def gather_pages(pages: Any, page_ids: Int32[Array, " n"]) -> Any:
    """Copies pages out of a pool: every leaf `[layers, n, ...]`, in the order of ids.

    Where an id is `NO_PAGE` the content is undefined.
    """
    found = jnp.maximum(page_ids, 0)
    return jax.tree.map(lambda leaf: leaf[:, found], pages)


def scatter_pages(pages: Any, page_ids: Int32[Array, " n"], content: Any) -> Any:
    """Copies content, as `gather_pages` returns it, into pages of a pool, in place.

    Args:
      pages: the pages, donated or carried.
      page_ids: page that each entry overwrites, no page twice; `NO_PAGE` does nothing.
      content: leaves `[layers, n, ...]`.

    Returns:
      The new pages.
    """

    def one_leaf(leaf: Array, new: Array) -> Array:
        # Only a scatter to distinct places has a transpose.
        beyond = leaf.shape[1] + jnp.arange(page_ids.shape[0], dtype=jnp.int32)
        place = jnp.where(page_ids < 0, beyond, page_ids)
        return leaf.at[:, place].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(one_leaf, pages, content)


def to_host(pages: Any, page_ids: np.ndarray | slice | None = None) -> Any:
    """Copies pages, or with no ids all arrays of a tree, to the memory of the host.

    With an array of ids the result is a copy of its own, which stays as it is when the
    device overwrites its buffers.
    """
    if page_ids is None:
        return jax.tree.map(np.asarray, pages)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, page_ids], pages)


def pad_pages(content: Any, num_pages: int, page_ids: Any) -> Any:
    """Returns arrays of `num_pages` pages on the host: content at its ids, else zeros.

    Programs take content of one width, so that none is compiled for each number.
    """

    def one_leaf(leaf: np.ndarray) -> np.ndarray:
        shape = leaf.shape[0], num_pages, *leaf.shape[2:]
        whole = np.zeros(shape, leaf.dtype)
        whole[:, page_ids] = leaf
        return whole

    return jax.tree.map(one_leaf, content)


def check_content(pages: Any, content: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Checks that arrays fit a pool, by the name of the type and the shape of each.

    Args:
      pages: the pool, or its shapes.
      content: type and shape of the leaves of the content, in their order.

    Returns:
      Number of pages in the content.

    Raises:
      ValueError: an array is missing, or of another type or shape.
    """
    wanted = jax.tree.leaves(pages)
    if len(content) != len(wanted):
        raise ValueError(f"{len(content)} arrays of pages must be {len(wanted)}")
    shape = content[0][1]
    count = max(shape[1], 0) if len(shape) > 1 else 0
    for (name, shape), leaf in zip(content, wanted, strict=True):
        if name != leaf.dtype.name or shape != (leaf.shape[0], count, *leaf.shape[2:]):
            raise ValueError(
                f"pages of {name} {shape} must be {leaf.dtype.name} "
                f"({leaf.shape[0]}, {count}, {str(leaf.shape[2:])[1:]}"
            )
    return count


def flatten_layers(pages: Any) -> Any:
    """Views every leaf as `[layers * pages, ...]`, for `flat_ids`, without a copy."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), pages)


def unflatten_layers(view: Shaped[Array, "..."], shape: tuple[int, ...]) -> Array:
    """The inverse of `flatten_layers` for one leaf.

    In an axis of one, a single KV head, XLA sees no order: it would choose another
    layout that is the same, and copy all pages from one to the other.
    """
    leaf = view.reshape(shape)
    if 1 not in shape:
        return leaf
    return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim))))
