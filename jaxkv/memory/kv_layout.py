"""Layouts: what the leaves of pages hold, how it is written, read and attended to."""

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
from pallas_kernels.quantizing import QuantizedArray
from pallas_kernels.row_packing import Packing


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The meaning of the leaves `k` and `v` of pages, as a value.

    Keys are a leaf `[layers, pages, kv_heads, page_size, head_dim]`, and so are values
    unless they are part of the keys. Code outside `memory` writes and reads pages by
    these functions only; a subclass with others, registered as static, is a layout too.
    """

    kv_dtype: Literal["model", "int8", "fp8"] = "model"
    """"model": the type of the model. Otherwise 8 bits with a scale for each token and
    head, see `pallas_kernels.quantizing`."""
    value_width: int | None = None
    """None: values have a leaf of their own. Otherwise the values are the first
    `value_width` numbers of the keys, which have no other leaf, as in the latent
    attention of DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    def make(self, shape: tuple[int, ...], dtype: DTypeLike) -> Pages:
        """Makes pages of zeros.

        `shape` is that of the keys, and `dtype` is that of the model.
        """

        def leaf() -> Any:  # not one for both: a buffer can be donated only once
            if self.kv_dtype == "model":
                return jnp.zeros(shape, dtype)
            scales = jnp.zeros(shape[:4], np.promote_types(dtype, np.float32))
            numbers = jnp.zeros(shape, quantizing.NUMBERS[self.kv_dtype])
            return QuantizedArray(numbers, scales)

        return Pages(leaf(), leaf() if self.value_width is None else None, self)

    def write(
        self,
        pages: Pages,
        layer: Layer,
        k: Float[Array, "rows kv_heads head_dim"],
        v: Float[Array, "rows kv_heads value_width"] | None,
        rows: Rows,
    ) -> Pages:
        """Writes one layer's keys and values of every row to the row's page, in place.

        They are cast or rounded to the type of the pages, which are donated or carried.
        Padding rows and rows whose place is unmapped are dropped. No two rows may have
        the same slot and position, and a page written to must have a count of one (I3).

        Raises:
          ValueError: `v` is None and values have a leaf of their own, or is not and
            they are part of the keys; or `rows.slot` is None and there are not as many
            rows as slots.
        """
        if (v is None) == (self.value_width is None):
            needed = "an array" if v is None else "None"
            raise ValueError(f"v={validation.shown(v)} must be {needed} for {self}")
        page, offset = locate(rows, page_size=pages.page_size)
        sizes = {"num_layers": pages.num_layers, "num_pages": pages.num_pages}
        ids = flat_ids(page, layer, **sizes)

        def put(leaf: Any, new: Array) -> Any:
            numbers, scales = quantizing.split_quantized(flat(leaf))
            found = write_rows(numbers, ids, offset, new, scales=scales)
            return jax.tree.map(
                lambda old, new: unflat(new, old.shape),
                leaf,
                quantizing.join_quantized(*found),
            )

        new_v = None if v is None else put(pages.v, v)
        return pages._replace(k=put(pages.k, k), v=new_v)

    def read(
        self, pages: Pages, layer: Layer, page_ids: Int32[Array, "n columns"]
    ) -> tuple[
        Float[Array, "n tokens kv_heads head_dim"],
        Float[Array, "n tokens kv_heads value_width"],
    ]:
        """Copies one layer's keys and values out of pages, in token order.

        For checks and for research code: attention reads the pages where they are.

        Returns:
          Both with tokens = columns * page_size, as `write` was given them, up to their
          rounding to the type of the pages; zeros where no page is mapped.
        """

        def one(leaf: Any) -> Array:
            numbers, scales = quantizing.split_quantized(leaf)
            found = arrays.take(numbers, (layer, page_ids), fill=0)
            if scales is not None:
                worth = arrays.take(scales, (layer, page_ids), fill=0)
                found = quantizing.dequantize(found, worth)
            num_rows, columns, heads, page_size, width = found.shape
            tokens = found.swapaxes(2, 3)
            return tokens.reshape(num_rows, columns * page_size, heads, width)

        k = one(pages.k)
        return k, k[..., : self.value_width] if pages.v is None else one(pages.v)

    def plan(
        self,
        pages: Pages,
        rows: Rows,
        *,
        num_q_heads: int,
        dtype: DTypeLike,
        window: int | None = None,
        numerics: Literal["fast", "reproducible"] = "fast",
    ) -> dispatch.StepPlan | None:
        """Prepares `attend` for these rows, once for all layers; None if not needed.

        `dtype` is that of the queries; window and numerics are those of `attend`.
        """
        k, num_rows = pages.k, rows.position.shape[0]
        return api.make_plan(
            jax.ShapeDtypeStruct((num_rows, num_q_heads, k.shape[-1]), dtype),
            jax.ShapeDtypeStruct(k.shape[1:], k.dtype),
            value_width=self.value_width,
            numerics=numerics,
            **_seen_here(pages, rows, window),
        )

    def attend(
        self,
        pages: Pages,
        layer: Layer,
        q: Float[Array, "rows q_heads head_dim"],
        rows: Rows,
        *,
        scale: float | None = None,
        window: int | None = None,
        numerics: Literal["fast", "reproducible"] = "fast",
        packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None = None,
        plan: dispatch.StepPlan | None = None,
        own_rows: bool = False,
    ) -> Float[Array, "own q_heads value_width"]:
        """Attends from rows over pages that already have the keys of these rows.

        Of pages in parts each device attends over its own, and the states are merged.

        Args:
          pages: the pages.
          layer: which layer of them.
          q: queries, positions already encoded in them.
          rows: the packed rows.
          scale: factor on the scores; None means head_dim ** -0.5.
          window: latest keys a row sees; None means all.
          numerics: "reproducible" gives a row the same bits in any batch.
          packed_q: the queries as the plan packs them; None packs them here.
          plan: the result of `plan` for these rows; None makes one where it is needed.
          own_rows: True if a device keeps its part of the rows only, not all of them.

        Returns:
          The output of every row that the device keeps, 0 on padding rows.
        """
        k_pages, k_scales = quantizing.split_quantized(flat(pages.k))
        v_pages, v_scales = quantizing.split_quantized(flat(pages.v))
        state = api.paged_attention(
            q,
            k_pages,
            v_pages,
            value_width=self.value_width,
            k_scales=k_scales,
            v_scales=v_scales,
            layer=layer,
            num_layers=pages.num_layers,
            scale=scale,
            numerics=numerics,
            packed_q=packed_q,
            plan=plan,
            **_seen_here(pages, rows, window),
        )
        if page_parts.degree() > 1:
            merge = api.merge_own_rows if own_rows else api.merge_devices
            state = merge(state, page_parts.CONTEXT)
        return state.out

    def specs(self, pages: Pages, *, heads: str) -> Any:
        """Returns how a mesh divides `k` and `v`, as `PartitionSpec`s in their place.

        KV heads are divided over the axis `heads`, unless they are rows that all query
        heads share; token places of a page over `page_parts.CONTEXT`. The specs may be
        a prefix of the tree of the pages.
        """
        axis = heads if self.value_width is None else None
        spec = PartitionSpec(None, None, axis, page_parts.CONTEXT)
        return pages._replace(k=spec, v=spec)


FULL = KVLayout()
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

    `dtype` is that of the model, and `kv_dtype` that of a `KVLayout`. Above 0,
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
        pages = KVLayout(kv_dtype).make(shape, dtype)
        if not width:
            return pages
        kept = jnp.zeros((1, num_pages, 2, page_size, width // 2), dtype)
        return pages._replace(features=kept)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"no room for {num_pages=}: {reason}") from None


def _seen_here(pages: Pages, rows: Rows, window: int | None) -> dict[str, Any]:
    """What rows see of this device's parts of the pages, as attention takes it."""
    position, context, ancestors = rows.position, rows.context, rows.ancestors
    if page_parts.degree() > 1:
        last = functools.partial(page_parts.last, part=pages.part)
        position = last(position)
    if page_parts.degree() > 1 and context is not None and ancestors is not None:
        # A tree's places on this device are contiguous columns again, if fewer.
        start = jnp.where(context >= 0, last(context - 1) + 1, -1)
        column = jnp.arange(ancestors.shape[1], dtype=jnp.int32)
        column = page_parts.whole(start[:, None] + column[None, :], part=pages.part)
        slot = jnp.maximum(slots_of(rows), 0)
        column = (column - context[:, None])[slot]
        inside = (column >= 0) & (column < ancestors.shape[1])
        kin = jnp.take_along_axis(ancestors, jnp.where(inside, column, 0), axis=1)
        in_tree = context[slot] >= 0
        # Of a row in a tree the position only marks that it is no padding.
        is_row = in_tree & (rows.position >= 0)
        position = jnp.where(is_row, jnp.maximum(position, 0), position)
        context, ancestors = start, kin & inside & in_tree[:, None]
    return {
        "page_ids": rows.page_ids,
        "positions": position,
        "slots": rows.slot,
        "context": context,
        "ancestors": ancestors,
        "window": page_parts.window(window, part=pages.part),
    }


def can_rotate_and_write(pages: Pages, qkv: Any) -> bool:
    """Returns True if `rotate_and_write` is one kernel for a projection like this."""
    return (
        pages.layout == FULL
        and rotary_write.choose_rotary_write(qkv, pages.k) != "reference"
    )


def rotate_and_write(
    pages: Pages,
    layer: Layer,
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"],
    cos_sin: rotary_write.RotaryCosSin,
    page: Int32[Array, " rows"],
    offset: Int32[Array, " rows"],
    packing: Packing | None = None,
) -> tuple[rotary_write.RotaryWriteOutput, Pages]:
    """Encodes the rows' positions, and writes one layer's K and V, in one kernel.

    As `FULL.write`, in place, where `can_rotate_and_write`.

    Args:
      pages: the pages, donated or carried.
      layer: which layer of them.
      qkv: projection of every row: queries, key, value of each KV head.
      cos_sin: cosines and sines of every query's angles.
      page: page that each row's K and V belong to, see `locate`.
      offset: their place there.
      packing: how attention packs the queries, None if it does not.

    Returns:
      The queries, also packed; and the pages.
    """
    written = rotary_write.write_rotated_kv(
        qkv,
        cos_sin,
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
