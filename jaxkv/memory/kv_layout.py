"""Layouts: what the leaves of pages hold, how it is written, read and attended to.

The layout of the pages is a value, `Pages.layout`, with the functions of `KVLayout`.
`KeyValueLayout` keeps keys and values in a leaf each, `[layers, pages, kv_heads,
page_size, head_dim]`, in the type of the model or in 8 bits. Another layout, such as
one leaf whose first numbers are the values, brings its own functions; `write_leaf`,
`read_leaf`, `attend_leaves` and `plan_leaves` do the work for any leaf.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxkv import arrays, validation
from jaxkv.memory import page_parts
from jaxkv.memory.kv_pages import Pages, Rows, flat, locate, slots_of, unflat
from pallas_kernels import quantizing
from pallas_kernels.layered import Layer, flat_ids
from pallas_kernels.page_ops import rotary_write
from pallas_kernels.page_ops.write import write_rows
from pallas_kernels.paged_attention import api, dispatch
from pallas_kernels.quantizing import Quantized
from pallas_kernels.row_packing import Packing

type Leaf = Array | Quantized
"""Numbers `[layers, pages, heads, page_size, width]`, in 8 bits with scales."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class KeyValueLayout:
    """Keys and values of all KV heads, in a leaf each."""

    kv_dtype: Literal["model", "int8", "fp8"] = "model"
    """"model": the type of the model. Otherwise 8 bits with a scale for each token and
    head, see `pallas_kernels.quantizing`."""

    def make(self, shape: tuple[int, ...], dtype: DTypeLike) -> Pages:
        """As `KVLayout.make`."""
        # Two leaves: a buffer can be donated only once.
        k, v = (make_leaf(shape, dtype, self.kv_dtype) for _ in range(2))
        return Pages(k, v, self)

    def write(
        self,
        pages: Pages,
        layer: Layer,
        k: Float[Array, "rows kv_heads head_dim"],
        v: Float[Array, "rows kv_heads head_dim"] | None,
        rows: Rows,
    ) -> Pages:
        """As `KVLayout.write`.

        Raises:
          ValueError: `v` is None, or `rows` do not fit.
        """
        if v is None:
            raise ValueError(f"{v=} must be an array: {self} keeps values of their own")
        places = locate(rows, page_size=pages.page_size)
        return pages._replace(
            k=write_leaf(pages.k, layer, k, *places),
            v=write_leaf(pages.v, layer, v, *places),
        )

    def read(
        self, pages: Pages, layer: Layer, page_ids: Int32[Array, "n columns"]
    ) -> tuple[
        Float[Array, "n tokens kv_heads head_dim"],
        Float[Array, "n tokens kv_heads head_dim"],
    ]:
        """As `KVLayout.read`."""
        k, v = (read_leaf(leaf, layer, page_ids) for leaf in (pages.k, pages.v))
        return k, v

    def plan(
        self, pages: Pages, rows: Rows, **options: Any
    ) -> dispatch.StepPlan | None:
        """As `KVLayout.plan`."""
        return plan_leaves(pages, rows, pages.k, **options)

    def attend(
        self,
        pages: Pages,
        layer: Layer,
        q: Float[Array, "rows q_heads head_dim"],
        rows: Rows,
        **options: Any,
    ) -> Float[Array, "own q_heads head_dim"]:
        """As `KVLayout.attend`."""
        return attend_leaves(pages, layer, q, rows, pages.k, pages.v, **options)

    def specs(self, pages: Pages, *, heads: str) -> Any:
        """As `KVLayout.specs`."""
        spec = PartitionSpec(None, None, heads, page_parts.CONTEXT)
        return pages._replace(k=spec, v=spec)


FULL = KeyValueLayout()
"""K and V in the type of the model."""


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
    """Makes pages of K and V, filled with zeros; all sizes are at least 1.

    `dtype` is that of the model, and `kv_dtype` that of a `KeyValueLayout`. Above 0,
    `num_features` numbers of each token are kept as well, in the model's type whatever
    `kv_dtype` is.

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
        pages = KeyValueLayout(kv_dtype).make(shape, dtype)
        if not width:
            return pages
        kept = jnp.zeros((1, num_pages, 2, page_size, width // 2), dtype)
        return pages._replace(features=kept)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"no room for {num_pages=}: {reason}") from None


def make_leaf(
    shape: tuple[int, ...], dtype: DTypeLike, kv_dtype: Literal["model", "int8", "fp8"]
) -> Leaf:
    """Makes a leaf of zeros; in 8 bits with a scale for each token and head."""
    if kv_dtype == "model":
        return jnp.zeros(shape, dtype)
    scales = jnp.zeros(shape[:4], np.promote_types(dtype, np.float32))
    return Quantized(jnp.zeros(shape, quantizing.NUMBERS[kv_dtype]), scales)


def write_leaf(
    leaf: Leaf,
    layer: Layer,
    new: Float[Array, "rows heads width"],
    page: Int32[Array, " rows"],
    offset: Int32[Array, " rows"],
) -> Leaf:
    """Writes what every row keeps to its place, see `locate`, in place."""
    ids = flat_ids(page, layer, num_layers=leaf.shape[0], num_pages=leaf.shape[1])
    numbers, scales = quantizing.parts(flat(leaf))
    written = quantizing.whole(*write_rows(numbers, ids, offset, new, scales=scales))
    return jax.tree.map(lambda old, new: unflat(new, old.shape), leaf, written)


def read_leaf(
    leaf: Leaf, layer: Layer, page_ids: Int32[Array, "n columns"]
) -> Float[Array, "n tokens heads width"]:
    """Copies one layer's rows out of a leaf, in token order; zeros where unmapped."""
    numbers, scales = quantizing.parts(leaf)
    found = arrays.take(numbers, (layer, page_ids), fill=0)
    if scales is not None:
        worth = arrays.take(scales, (layer, page_ids), fill=0)
        found = quantizing.dequantize(found, worth)
    num_rows, columns, heads, page_size, width = found.shape
    return found.swapaxes(2, 3).reshape(num_rows, columns * page_size, heads, width)


def attend_leaves(
    pages: Pages,
    layer: Layer,
    q: Float[Array, "rows q_heads head_dim"],
    rows: Rows,
    k: Leaf,
    v: Leaf | None,
    *,
    own_rows: bool = False,
    window: int | None = None,
    **options: Any,
) -> Float[Array, "own q_heads value_width"]:
    """Attends over leaves of the pages that hold keys and values.

    Arguments are those of `KVLayout.attend`. `v` is None where the first `value_width`
    numbers of a key, an option of `paged_attention`, are the value.
    """
    k_pages, k_scales = quantizing.parts(flat(k))
    v_pages, v_scales = quantizing.parts(flat(v))
    rows = _seen_here(pages, rows)
    state = api.paged_attention(
        q,
        k_pages,
        v_pages,
        rows.page_ids,
        rows.position,
        rows.slot,
        context=rows.context,
        ancestors=rows.ancestors,
        k_scales=k_scales,
        v_scales=v_scales,
        layer=layer,
        num_layers=pages.num_layers,
        window=page_parts.window(window, part=pages.part),
        **options,
    )
    if page_parts.degree() > 1:
        merge = api.merge_own_rows if own_rows else api.merge_devices
        state = merge(state, page_parts.CONTEXT)
    return state.out


def plan_leaves(
    pages: Pages,
    rows: Rows,
    k: Leaf,
    *,
    num_q_heads: int,
    dtype: DTypeLike,
    window: int | None = None,
    **options: Any,
) -> dispatch.StepPlan | None:
    """Prepares `attend_leaves`. Arguments are those of `KVLayout.plan`."""
    rows = _seen_here(pages, rows)
    return api.make_plan(
        jax.ShapeDtypeStruct((len(rows.position), num_q_heads, k.shape[-1]), dtype),
        jax.ShapeDtypeStruct(k.shape[1:], k.dtype),
        rows.page_ids,
        rows.position,
        rows.slot,
        context=rows.context,
        ancestors=rows.ancestors,
        window=page_parts.window(window, part=pages.part),
        **options,
    )


def _seen_here(pages: Pages, rows: Rows) -> Rows:
    """Rows with the places that they see of this device's parts of the pages."""
    if page_parts.degree() == 1:
        return rows
    last = functools.partial(page_parts.last, part=pages.part)
    position = last(rows.position)
    if rows.context is None or rows.ancestors is None:
        return rows._replace(position=position)
    # A tree's places on this device are contiguous columns again, if fewer.
    start = jnp.where(rows.context >= 0, last(rows.context - 1) + 1, -1)
    column = jnp.arange(rows.ancestors.shape[1], dtype=jnp.int32)
    column = page_parts.whole(start[:, None] + column[None, :], part=pages.part)
    slot = jnp.maximum(slots_of(rows), 0)
    column = (column - rows.context[:, None])[slot]
    inside = (column >= 0) & (column < rows.ancestors.shape[1])
    kin = jnp.take_along_axis(rows.ancestors, jnp.where(inside, column, 0), axis=1)
    in_tree = rows.context[slot] >= 0
    # Of a row in a tree the position only marks that it is no padding.
    is_row = in_tree & (rows.position >= 0)
    return rows._replace(
        position=jnp.where(is_row, jnp.maximum(position, 0), position),
        context=start,
        ancestors=kin & inside & in_tree[:, None],
    )


def can_rotate_and_write(
    pages: Pages,
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"] | jax.ShapeDtypeStruct,
) -> bool:
    """Returns True if one kernel writes to these pages and encodes positions."""
    return pages.layout == FULL and rotary_write.choose(qkv, pages.k) != "reference"


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

    As `KeyValueLayout.write`, in place, where `can_rotate_and_write`.

    Args:
      pages: the pages, donated or carried.
      layer: which layer of them.
      qkv: projection of every row: queries, key, value of each KV head.
      turns: cosines and sines of every query's angles.
      page: page that each row's K and V belong to, see `locate`.
      offset: their place there.
      packing: how attention packs the queries, None if it does not.

    Returns:
      The queries, also packed; and the pages.
    """
    written = rotary_write.rotate_and_write(
        qkv,
        turns,
        flat(pages.k),
        flat(pages.v),
        page,
        offset,
        packing=packing,
        layer=layer,
        num_layers=pages.num_layers,
    )
    k, v = (unflat(x, pages.k.shape) for x in (written.k_pages, written.v_pages))
    return written, pages._replace(k=k, v=v)
