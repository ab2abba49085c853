"""The K and V arrays that hold the pages, all layers together, and their rows' places.

Layout. Every leaf of `Pages` leads with `[layers, pages]`; a page id means token places
and is shared by all leaves. Inside a page the heads stand before the tokens, so that
one head's keys of a page are contiguous: `[layers, pages, kv_heads, page_size,
head_dim]`.

In place. The pages are the largest thing in memory and must never be copied. Donate
them to the outermost `jit`, and carry them through loops: a `lax.scan` that takes them
as scanned input and returns them as scanned output copies them three times, and a
`lax.cond` around unrolled layers once more. `write` and kernels index the `flat` view,
`[layers * pages, ...]`, through ids that `flat_ids` has offset by the layer: neither
ever slices a layer out.

Sentinels. `NO_PAGE` plus an offset would be the last page of another layer, so unmapped
places become an out-of-range id after the offset, never before.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxkv import arrays, validation
from jaxkv.memory import page_parts
from jaxkv.memory.page_pool import NO_PAGE
from pallas_kernels import quantizing
from pallas_kernels.layered import Layer, flat_ids
from pallas_kernels.page_ops import rotary_write
from pallas_kernels.page_ops.copy import copy_pages
from pallas_kernels.page_ops.write import write_kv
from pallas_kernels.quantizing import Quantized
from pallas_kernels.row_packing import Packing

_COPIES_AT_ONCE = 16
"""Pages that `copy` holds outside the pool at one time, all layers of each."""


class Pages(NamedTuple):
    """K and V of every page. Sizes are read from the shapes."""

    k: Float[Array, "layers pages kv_heads page_size head_dim"]
    """Keys, positions already encoded in them. In 8 bits this is a `Quantized` of that
    shape, numbers and a scale for each token and head: leaves like all others."""
    v: Float[Array, "layers pages kv_heads page_size head_dim"]
    """Values of the same tokens, without positions."""
    beside: "Pages | None" = None
    """K and V of a model that runs beside this one, such as a drafter's: the same pages
    of it, so that they are copied, swapped and shared together."""
    features: Float[Array, "1 pages 2 page_size half"] | None = None
    """What the model made of each token, for heads that draft; see `memory.features`.
    They lie like K or V of one layer with two heads, half of them each, and go where
    these go. (In an axis of one XLA sees no order, and copies.)"""

    @property
    def kv_dtype(self) -> str:
        """What K and V are kept in, as `EngineConfig.kv_dtype` says it."""
        if not isinstance(self.k, Quantized):
            return "model"
        return quantizing.kind_of(self.k.dtype) or "model"

    @property
    def num_layers(self) -> int:
        """Layers that write here."""
        return self.k.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, each with K and V of all layers."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Token places in a page, on all devices that have a part of it."""
        return self.part * page_parts.degree()

    @property
    def part(self) -> int:
        """Token places of a page that are here, see `page_parts`."""
        return self.k.shape[3]


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


def make_pages(
    *,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    kv_dtype: Literal["model", "int8", "fp8"] = "model",
    num_features: int = 0,
) -> Pages:
    """Makes the K and V arrays, filled with zeros; all sizes are at least 1.

    `dtype` is that of the model. With a `kv_dtype` of "model" K and V are kept in it,
    with the others in 8 bits with a scale for each token and head, see
    `pallas_kernels.quantizing`. Above 0, `num_features` numbers of each token are kept
    beside them, in the model's type whatever `kv_dtype` is.

    Returns:
      The pages: 2 * num_layers * num_pages * num_kv_heads * page_size * head_dim
      elements in all, a scale for every head_dim of them if of 8 bits, and num_pages *
      page_size * num_features more.

    Raises:
      ValueError: a size is below 1, the type is not a floating one, or there is no
      memory for them.
    """
    sizes = dict(
        num_layers=num_layers,
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
    )
    shape = tuple(validation.integer(name, x, low=1) for name, x in sizes.items())
    if shape[0] * shape[1] >= validation.INT32:  # kernels see the layers as one pool
        raise ValueError(f"{num_layers=} times {num_pages=} must be below 2**31")
    dtype = validation.floating("dtype", dtype)
    validation.choice("kv_dtype", kv_dtype, ("model", *quantizing.NUMBERS))
    width = validation.integer("num_features", num_features, low=0)
    if width % 2:
        raise ValueError(f"{num_features=} must be even")
    try:
        pages = _empty(shape, dtype, kv_dtype)
        if not width:
            return pages
        kept = jnp.zeros((1, num_pages, 2, page_size, width // 2), dtype)
        return pages._replace(features=kept)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"no room for {num_pages=}: {reason}") from None


def _empty(shape: tuple[int, ...], dtype: np.dtype, kv_dtype: str) -> Pages:
    """K and V arrays of zeros."""
    # Every array anew, not one twice: a buffer can be donated only once.
    if kv_dtype == "model":
        return Pages(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
    numbers, wide = quantizing.NUMBERS[kv_dtype], np.promote_types(dtype, np.float32)

    def empty() -> Any:
        scales = jnp.zeros(shape[:4], wide)
        return quantizing.whole(jnp.zeros(shape, numbers), scales)

    return Pages(k=empty(), v=empty())


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
    # Place -1 falls into column -1 of the table, which `take` treats as unmapped.
    page = arrays.take(page_ids, (slot, place // page_size), fill=NO_PAGE)
    if (num := page_parts.degree()) == 1:
        return page, place % page_size
    part = page_size // num
    offset = place % page_size - page_parts.begin(part)
    is_here = (offset >= 0) & (offset < part)
    return jnp.where(is_here, page, NO_PAGE), jnp.where(is_here, offset, 0)


def write(
    pages: Pages,
    layer: Layer,
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    rows: Rows,
) -> Pages:
    """Writes one layer's K and V of every row to the row's page, in place.

    Keys and values are cast to the type of the pages, donated or carried, or rounded to
    their 8 bits. Padding rows and rows whose place is unmapped are dropped. No two rows
    may have the same slot and position, and a page written to must have a count of one
    (I3).

    Raises:
      ValueError: `rows.slot` is None and there are not as many rows as slots.
    """
    page, offset = locate(rows, page_size=pages.page_size)
    sizes = {"num_layers": pages.num_layers, "num_pages": pages.num_pages}
    view = flat(pages)
    (k_pages, k_scales), (v_pages, v_scales) = map(quantizing.parts, view[:2])
    written = write_kv(
        k_pages,
        v_pages,
        flat_ids(page, layer, **sizes),
        offset,
        k,
        v,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    new = pages._replace(
        k=quantizing.whole(written.k_pages, written.k_scales),
        v=quantizing.whole(written.v_pages, written.v_scales),
    )
    return jax.tree.map(lambda old, new: _whole(new, old.shape), pages, new)


def rotate_and_write(
    pages: Pages,
    layer: Layer,
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"],
    turns: rotary_write.Turns,
    page: Int32[Array, " rows"],
    offset: Int32[Array, " rows"],
    packing: Packing | None = None,
) -> tuple[rotary_write.Rotated, Pages]:
    """Encodes the rows' positions, and writes one layer's K and V, in one kernel.

    As `write`, in place; only pages of 16 bits, where `rotary_write.why_not` says None.

    Args:
      pages: the pages, donated or carried.
      layer: which layer of them.
      qkv: what the layer projects every row to: queries, key, value of each KV head.
      turns: cosines and sines of every query's angles.
      page: page that each row's K and V belong to, see `locate`.
      offset: their place there.
      packing: how attention packs the queries, None if it does not.

    Returns:
      The queries, also packed; and the pages.
    """
    view = flat(pages)
    written = rotary_write.rotate_and_write(
        qkv,
        turns,
        view.k,
        view.v,
        page,
        offset,
        packing=packing,
        layer=layer,
        num_layers=pages.num_layers,
    )
    k, v = (_whole(x, pages.k.shape) for x in (written.k_pages, written.v_pages))
    return written, pages._replace(k=k, v=v)


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

        view, other = (x.reshape(-1, *x.shape[2:]) for x in (leaf, read))
        places = every(read, ids[0]), every(leaf, ids[1])
        copied = copy_pages(
            view, *places, origin=None if read is leaf else other, disjoint=True
        )
        return _whole(copied, leaf.shape)

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

    Of a verified token tree what stays is a path, whose tokens then stand one behind
    another. Next to nothing is done where nobody moves.

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
                found = page_parts.from_owner(found)
            return leaf.at[:, page, :, to].set(found, mode="drop")

        return jax.tree.map(one_leaf, pages)

    return arrays.when(jnp.any(moves), every_one, pages, moves, source, target)


def flat(pages: Pages) -> Pages:
    """Views every leaf as `[layers * pages, ...]`, for `flat_ids`, without a copy."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), pages)


def _whole(view: Shaped[Array, "..."], shape: tuple[int, ...]) -> Array:
    """The inverse of `flat` for one leaf.

    In an axis of one, a single KV head, XLA sees no order: it would lay the pages out
    another way that is the same, and copy all of them from one to the other.
    """
    leaf = view.reshape(shape)
    if 1 not in shape:
        return leaf
    return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim))))


def gather(
    pages: Pages, layer: Layer, page_ids: Int32[Array, "n columns"]
) -> tuple[
    Float[Array, "n tokens kv_heads head_dim"],
    Float[Array, "n tokens kv_heads head_dim"],
]:
    """Copies one layer's K and V out of the pages, in token order, for rows of a table.

    For checks and for research code: attention reads the pages where they are.

    Returns:
      K and V with tokens = columns * page_size, as `write` was given them, up to their
      rounding to the type of the pages; zeros where no page is mapped.
    """

    def one(leaves: Array | Quantized) -> Array:
        numbers, scales = quantizing.parts(leaves)
        found = arrays.take(numbers, (layer, page_ids), fill=0)
        if scales is not None:
            worth = arrays.take(scales, (layer, page_ids), fill=0)
            found = quantizing.dequantize(found, worth)
        num_rows, columns, kv_heads, page_size, head_dim = found.shape
        tokens = found.swapaxes(2, 3)
        return tokens.reshape(num_rows, columns * page_size, kv_heads, head_dim)

    return one(pages.k), one(pages.v)
