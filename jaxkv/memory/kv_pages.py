"""Pages of the KV cache, all layers: leaves, rows written to them, copies of pages.

Leaves. Every leaf of `Pages` begins with `[layers, pages, heads, page_size]`; a page id
addresses token places in all leaves, and in `key_bounds` the page. Functions that copy,
move, swap or send pages map over the leaves. Only a `KVLayout` knows the content of a
leaf, see `kv_layout`. Inside a page the heads come before the tokens, so that one
head's keys of a page are contiguous.

In place. The pages are the largest arrays in memory and must never be copied. Donate
them to the outermost `jit`, and carry them through loops: a `lax.scan` with pages as
scanned input and output copies them three times, and a `lax.cond` around unrolled
layers once. Writes and kernels index the view of `flatten_layers`, `[layers * pages,
...]`, with ids that `flat_ids` offsets by the layer, so that no layer is sliced out.

Copies. `copy` copies pages on the device. `gather_pages`, `to_host`, `expand_pages` and
`scatter_pages` move pages through host memory: for swapping, prefix transfer to another
worker, and snapshots.

Sentinels. `NO_PAGE` plus an offset would be the last page of another layer, so unmapped
places are set to an out-of-range id after the offset is added, never before.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

from jaxkv import arrays, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.memory import page_parts
from jaxkv.memory.page_pool import NO_PAGE
from pallas_kernels.layered import flat_ids
from pallas_kernels.page_ops import copy_pages

if TYPE_CHECKING:
    from jaxkv.memory.kv_layout import KVLayout

_COPIES_AT_ONCE = 16
"""Pages, of all layers, that `copy` holds in temporary memory at a time."""


class Pages(NamedTuple):
    """The KV cache: keys and values of every page. Sizes are those of the arrays.

    Only the layout accesses `k` and `v`; other code calls its methods.
    """

    k: PyTree[Array]
    """Keys with encoded positions: an array, or a tree of arrays such as a
    `QuantizedArray`."""
    v: PyTree[Array]
    """Values of the same tokens; None in a layout whose values are part of the keys."""
    layout: "KVLayout"
    """Content of `k` and `v`; static, part of the tree's structure."""
    draft_pages: "Pages | None" = None
    """K and V of a second model, such as a draft model, with the same page ids: they
    are copied, swapped and shared with the pages of the first model."""
    other_heads: "Pages | None" = None
    """K and V of layers whose KV heads have another number or width, with the same page
    ids; None if all layers are alike."""
    features: Float[Array, "1 pages 2 page_size half"] | None = None
    """Hidden states of each token for drafting heads; see `memory.features`. Stored
    like K of one layer with two heads, each with half of the numbers. (A second head,
    because XLA chooses another layout for an axis of size one and copies.)"""
    routes: Int32[Array, "1 pages mixtures page_size top_k"] | None = None
    """Experts of each token, if they are recorded; see `memory.features`."""
    states: PyTree[Array] = None
    """States of recurrent layers, leaves `[layers, states, ...]`; None without such
    layers. States have numbers of their own, see `memory.state_pool`: functions that
    copy or move pages leave them as they are."""
    windowed: "Pages | None" = None
    """K and V of layers with a window, if these have page ids of their own, see
    `memory.window_pool`; their `layout.window` is the largest window."""
    queries: Float[Array, "layers slots window q_heads head_dim"] | None = None
    """Scaled queries of the last tokens of each slot, a ring by position, for the rules
    of `memory.kv_eviction` that read them."""
    attention: Float[Array, "layers pages kv_heads page_size"] | None = None
    """Attention that each token got so far, for "h2o" of `memory.kv_eviction`."""
    key_bounds: Float[Array, "layers pages kv_heads 2 head_dim"] | None = None
    """Largest keys, and largest negated keys, of each page, for "quest"."""

    @property
    def by_page(self) -> "Pages":
        """The leaves that page ids address: without states, queries, windowed pages."""
        return self._replace(states=None, windowed=None, queries=None)

    def with_leaves_of(self, pages: "Pages") -> "Pages":
        """Returns these pages with the leaves of `pages` that are not in `by_page`."""
        return self._replace(
            states=pages.states, windowed=pages.windowed, queries=pages.queries
        )

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the keys."""
        return jax.tree.leaves(self.k)[0].dtype

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self._shape[0]

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool, each with K and V of all layers."""
        return self._shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads on this device."""
        return self._shape[2]

    @property
    def page_size(self) -> int:
        """Token places in a page, on all devices (the block size in vLLM)."""
        return self.part * page_parts.num_page_parts()

    @property
    def part(self) -> int:
        """Token places of a page on this device, see `page_parts`."""
        return self._shape[3]

    @property
    def _shape(self) -> tuple[int, ...]:
        return jax.tree.leaves(self.k)[0].shape


NO_STATE = -1
"""Number of no state: that of a sequence before its first token, or of nothing to
write."""


class StateRows(NamedTuple):
    """States of recurrent layers that the rows of a step read and write."""

    source: Int32[Array, " rows"]
    """State before each row; `NO_STATE` before the first token of a sequence."""
    target: Int32[Array, " rows"]
    """State to overwrite with that after the row, the source of the slot's next row;
    `NO_STATE` on a padding row."""


class Rows(NamedTuple):
    """The packed rows of one step: one token each, of any mix of sequences."""

    token: Int32[Array, " rows"]
    """Input token id."""
    position: Int32[Array, " rows"]
    """Position in the sequence, from 0; -1 on a padding row."""
    slot: Int32[Array, " rows"] | None
    """Slot of the sequence; None if every slot has the same number of rows, in order.
    """
    page_ids: Int32[Array, "slots pages_per_slot"]
    """The page table, with pages mapped for the places that the rows write."""
    logit_rows: Int32[Array, " logit_rows"]
    """Indices of the rows whose logits are needed, padded with -1."""
    place: Int32[Array, " rows"] | None = None
    """Token place where K and V are written, -1 on a padding row; None if it equals the
    position. In a token tree, siblings have the same position and different places."""
    context: Int32[Array, " slots"] | None = None
    """Places that all rows of a slot with a token tree see; -1 for other slots."""
    ancestors: Bool[Array, "rows columns"] | None = None
    """True if the row also sees place `context + column`: its ancestors in the tree and
    itself. Set together with `context`."""
    states: StateRows | None = None
    """States of recurrent layers; None if the state of each slot has its number."""
    window_ids: Int32[Array, "slots pages_per_slot"] | None = None
    """The page table of `Pages.windowed`; None without such pages."""
    adapter: Int32[Array, " rows"] | None = None
    """Adapter of each row, from 1 on; 0, or None for all rows, without one."""
    in_answer: Bool[Array, " rows"] | None = None
    """True if the row's token is of an answer, for "quest"; None without it."""

    @property
    def places(self) -> Int32[Array, " rows"]:
        """Token place of each row, -1 on a padding row."""
        return self.position if self.place is None else self.place


@validation.checks_numbers()
def locate(
    rows: Rows, *, page_size: int
) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """Returns the page and the offset inside it of each row's K and V.

    Returns:
      Page ids, `NO_PAGE` on padding rows, at unmapped places, and where another device
      has this part of the page; and offsets in the local part, undefined where the page
      is `NO_PAGE`.

    Raises:
      ValueError: `rows.slot` is None and the number of rows is not a multiple of the
        number of slots.
    """
    return _where(rows.page_ids, slots_of(rows), rows.places, page_size)


def slots_of(rows: Rows) -> Int32[Array, " rows"]:
    """Returns the slot of every row.

    Raises:
      ValueError: `rows.slot` is None and the number of rows is not a multiple of the
        number of slots.
    """
    if rows.slot is not None:
        return rows.slot
    num_rows = rows.position.shape[0]
    num_slots = rows.page_ids.shape[0]
    if num_rows % num_slots:
        raise ValueError(
            f"{num_rows=} must be a multiple of {num_slots=} when slot is None"
        )
    return jnp.arange(num_rows, dtype=jnp.int32) // (num_rows // num_slots)


def state_rows(rows: Rows) -> StateRows:
    """Returns the states of rows, by default one for each slot, with its number."""
    if rows.states is not None:
        return rows.states
    slot = jnp.where(rows.position >= 0, slots_of(rows), NO_STATE)
    return StateRows(jnp.where(rows.position > 0, slot, NO_STATE), slot)


def _where(
    page_ids: Int32[Array, "slots pages_per_slot"],
    slot: Int32[Array, "*shape"],
    place: Int32[Array, "*shape"],
    page_size: int,
) -> tuple[Int32[Array, "*shape"], Int32[Array, "*shape"]]:
    # Place -1 gives column -1 of the table, which `arrays.take` treats as unmapped.
    page = arrays.take(page_ids, (slot, place // page_size), fill=NO_PAGE)
    if (num := page_parts.num_page_parts()) == 1:
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
    """Copies pages to other pages, in all layers and in place.

    The cost is that of the copied pages, close to zero if there are none, as in nearly
    every step. `_COPIES_AT_ONCE` pages at a time pass through temporary memory.

    Args:
      pages: the pages, donated or carried.
      source: page to read for each entry; `NO_PAGE` skips the entry.
      target: page to overwrite, distinct and not a source; `NO_PAGE` skips the entry.
      origin: pages of the same model to read from; None reads from `pages`.

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
        place = arrays.marked_indices(wanted, source.shape[0] + size)
        packed = [arrays.take(x, place, fill=NO_PAGE) for x in ids]

        def copy_pages_at(index: Array, pages: Pages) -> Pages:
            ids = [lax.dynamic_slice_in_dim(x, index * size, size) for x in packed]
            read = pages if origin is None else origin
            return jax.tree.map(
                lambda leaf, x: one_leaf(leaf, x, ids) if leaf.size else leaf,
                pages,
                read,
            )

        trips = (jnp.sum(wanted, dtype=jnp.int32) + size - 1) // size
        return lax.fori_loop(0, trips, copy_pages_at, pages)

    origin = None if origin is None else origin.by_page
    copied = arrays.update_if(
        jnp.any(wanted), every_one, pages.by_page, wanted, source, target
    )
    return copied.with_leaves_of(pages)


def move_tokens(
    pages: Pages,
    page_ids: Int32[Array, "slots pages_per_slot"],
    source: Int32[Array, "slots n"],
    target: Int32[Array, "slots n"],
) -> Pages:
    """Moves token content to other places of the same slot, in place.

    After a token tree is verified, this makes the accepted path contiguous. The cost is
    close to zero if no token moves.

    Args:
      pages: the pages, donated or carried; all layers and leaves are moved.
      page_ids: the page table.
      source: token place to read for each entry.
      target: token place to overwrite, distinct; -1 skips the entry.

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
            # A gather and a scatter of the entries' tokens.
            page = jnp.where(written < 0, leaf.shape[1], written)
            tokens = leaf[:, jnp.maximum(read, 0), :, at]
            if page_parts.num_page_parts() > 1:
                has = jnp.expand_dims(read >= 0, tuple(range(1, tokens.ndim)))
                tokens = jnp.where(has, tokens, jnp.zeros_like(tokens))
                tokens = page_parts.broadcast_from_owner(tokens)
            return leaf.at[:, page, :, to].set(tokens, mode="drop")

        return jax.tree.map(one_leaf, pages)

    moved = arrays.update_if(
        jnp.any(moves), every_one, pages.by_page, moves, source, target
    )
    return moved.with_leaves_of(pages)


def gather_pages(pages: PyTree[Array], page_ids: Int32[Array, " n"]) -> PyTree[Array]:
    """Copies pages out of a pool: every leaf is `[layers, n, ...]` in the order of ids.

    The content at an id of `NO_PAGE` is undefined.
    """
    safe_ids = jnp.maximum(page_ids, 0)
    return jax.tree.map(lambda leaf: leaf[:, safe_ids], pages)


def scatter_pages(
    pages: PyTree[Array], page_ids: Int32[Array, " n"], content: PyTree[Array]
) -> PyTree[Array]:
    """Copies content, as `gather_pages` returns it, into pages of a pool, in place.

    Args:
      pages: the pages, donated or carried.
      page_ids: page that each entry overwrites, distinct; `NO_PAGE` skips the entry.
      content: leaves `[layers, n, ...]`.

    Returns:
      The new pages.
    """

    def one_leaf(leaf: Array, new: Array) -> Array:
        # Only a scatter to distinct indices has a transpose.
        beyond = leaf.shape[1] + jnp.arange(page_ids.shape[0], dtype=jnp.int32)
        place = jnp.where(page_ids < 0, beyond, page_ids)
        return leaf.at[:, place].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(one_leaf, pages, content)


def to_host(
    pages: PyTree[Array], page_ids: np.ndarray | slice | None = None
) -> PyTree[np.ndarray]:
    """Copies pages, or without ids all arrays of a tree, to host memory.

    With an array of ids the result owns its memory and does not change when the device
    reuses its buffers.
    """
    if page_ids is None:
        return jax.tree.map(np.asarray, pages)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, page_ids], pages)


@validation.checks_numbers()
def expand_pages(
    content: PyTree[np.ndarray], num_pages: int, page_ids: np.ndarray | slice
) -> PyTree[np.ndarray]:
    """Returns host arrays of `num_pages` pages: `content` at its ids, zeros elsewhere.

    Programs take content of one fixed width, so that they are compiled once.
    """

    def one_leaf(leaf: np.ndarray) -> np.ndarray:
        shape = leaf.shape[0], num_pages, *leaf.shape[2:]
        slot_leaf = np.zeros(shape, leaf.dtype)
        slot_leaf[:, page_ids] = leaf
        return slot_leaf

    return jax.tree.map(one_leaf, content)


def check_content(
    pages: PyTree[ArrayOrShape], content: Sequence[tuple[str, tuple[int, ...]]]
) -> int:
    """Checks that arrays fit a pool, by their dtypes and shapes.

    Args:
      pages: the pool, or its shapes.
      content: dtype name and shape of each leaf of the content, in order.

    Returns:
      Number of pages in the content.

    Raises:
      ValueError: an array is missing, or has another dtype or shape.
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


def flatten_layers(pages: PyTree[Array]) -> PyTree[Array]:
    """Views every leaf as `[layers * pages, ...]`, for `flat_ids`, without a copy."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), pages)


def unflatten_layers(view: Shaped[Array, "..."], shape: tuple[int, ...]) -> Array:
    """Inverts `flatten_layers` for one leaf.

    For an axis of size one, such as a single KV head, XLA would choose another layout
    and copy all pages; the layout constraint prevents this.
    """
    leaf = view.reshape(shape)
    if 1 not in shape:
        return leaf
    return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim))))
