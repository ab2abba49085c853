"""Layouts of the KV cache: the content of pages, and how it is written and read."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PyTree

from jaxkv import arrays, validation
from jaxkv.memory import page_parts
from jaxkv.memory.kv_pages import (
    Pages,
    Rows,
    flatten_layers,
    locate,
    slots_of,
    unflatten_layers,
)
from pallas_kernels import quantizing
from pallas_kernels.layered import Layer, flat_ids
from pallas_kernels.page_ops import (
    RotaryCosSin,
    RotaryWriteOutput,
    choose_rotary_write,
    write_rotated_kv,
    write_rows,
)
from pallas_kernels.paged_attention import (
    PagedKV,
    RowView,
    ScoreTransform,
    StepPlan,
    make_plan,
    merge_devices,
    merge_own_rows,
    paged_attention,
)
from pallas_kernels.quantizing import QuantizedArray
from pallas_kernels.row_packing import Packing


class PartlyQuantizedKeys(NamedTuple):
    """Keys whose first numbers, the values, have 8 bits."""

    values: QuantizedArray
    """The values, with one scale for each token."""
    rest: Float[Array, "layers pages kv_heads page_size rest"]
    """The remaining numbers of the keys, in the dtype of the model."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The content of the leaves `k` and `v` of pages, as a value.

    Keys are a leaf `[layers, pages, kv_heads, page_size, head_dim]`; values are a leaf
    of the same form unless they are part of the keys. Code outside of `memory` accesses
    pages through these methods only; a subclass that overrides them, registered as
    static, is a layout too.
    """

    kv_dtype: Literal["model", "int8", "fp8"] = "model"
    """"model": the model's dtype. Otherwise 8 bits with a scale for each token and
        head, see `pallas_kernels.quantizing`."""
    value_width: int | None = None
    """None: values have a leaf of their own. Otherwise the values are the first
    `value_width` numbers of the keys, as in the latent attention of DeepSeek-V2,
    arXiv:2405.04434, section 2.1. The remaining numbers of the keys then have the dtype
    of the model for any `kv_dtype`."""
    window: int | None = None
    """Largest window of the layers, for `Pages.windowed`; else None."""

    def make(self, shape: tuple[int, ...], dtype: DTypeLike) -> Pages:
        """Makes pages of zeros.

        `shape` is the shape of the keys, and `dtype` the dtype of the model.
        """

        # New each time: buffers are donated only once.
        def leaf(width: int) -> PyTree[Array]:
            sizes = *shape[:4], width
            if self.kv_dtype == "model":
                return jnp.zeros(sizes, dtype)
            scales = jnp.zeros(shape[:4], np.promote_types(dtype, np.float32))
            numbers = jnp.zeros(sizes, quantizing.CODE_DTYPES[self.kv_dtype])
            return QuantizedArray(numbers, scales)

        width = shape[4]
        value_width = self.value_width
        if value_width is None:
            return Pages(leaf(width), leaf(width), self)
        if self.kv_dtype == "model" or value_width == width:
            return Pages(leaf(width), None, self)
        full_precision = jnp.zeros((*shape[:4], width - value_width), dtype)
        return Pages(PartlyQuantizedKeys(leaf(value_width), full_precision), None, self)

    def write(
        self,
        pages: Pages,
        layer: Layer,
        k: Float[Array, "rows kv_heads head_dim"],
        v: Float[Array, "rows kv_heads value_width"] | None,
        rows: Rows,
    ) -> Pages:
        """Writes one layer's keys and values of every row to the row's page, in place.

        They are cast or quantized to the type of the pages, which are donated or
        carried. Padding rows and rows whose place is unmapped are dropped. No two rows
        may have the same slot and position, and a written page must have a reference
        count of one (I3).

        Raises:
          ValueError: `v` is None although values have a leaf of their own, or is an
            array although they are part of the keys; or `rows.slot` is None and the
            number of rows is not a multiple of the number of slots.
        """
        if (v is None) == (self.value_width is None):
            needed = "an array" if v is None else "None"
            raise ValueError(
                f"v={validation.format_value(v)} must be {needed} for {self}"
            )
        page, offset = locate(rows, page_size=pages.page_size)
        sizes = {"num_layers": pages.num_layers, "num_pages": pages.num_pages}
        ids = flat_ids(page, layer, **sizes)

        def put(leaf: PyTree[Array], new: Array) -> PyTree[Array]:
            numbers, scales = quantizing.split_quantized(flatten_layers(leaf))
            leaf_parts = write_rows(numbers, ids, offset, new, scales=scales)
            return jax.tree.map(
                lambda old, new: unflatten_layers(new, old.shape),
                leaf,
                quantizing.join_quantized(*leaf_parts),
            )

        new_v = None if v is None else put(pages.v, v)
        if not isinstance(pages.k, PartlyQuantizedKeys):
            return pages._replace(k=put(pages.k, k), v=new_v)
        parts = jnp.split(k, [pages.k.values.shape[-1]], axis=-1)
        return pages._replace(k=PartlyQuantizedKeys(*map(put, pages.k, parts)))

    def read(
        self, pages: Pages, layer: Layer, page_ids: Int32[Array, "n columns"]
    ) -> tuple[
        Float[Array, "n tokens kv_heads head_dim"],
        Float[Array, "n tokens kv_heads value_width"],
    ]:
        """Copies one layer's keys and values out of pages, in token order.

        For checks and research code: attention reads the pages in place.

        Returns:
          Keys and values of columns * page_size tokens, as they were passed to `write`,
          up to rounding to the type of the pages; zeros where no page is mapped.
        """

        def one(leaf: Array | QuantizedArray) -> Array:
            numbers, scales = quantizing.split_quantized(leaf)
            page_numbers = arrays.take(numbers, (layer, page_ids), fill=0)
            if scales is not None:
                worth = arrays.take(scales, (layer, page_ids), fill=0)
                page_numbers = quantizing.dequantize(page_numbers, worth)
            num_rows, columns, heads, page_size, width = page_numbers.shape
            tokens = page_numbers.swapaxes(2, 3)
            return tokens.reshape(num_rows, columns * page_size, heads, width)

        if isinstance(pages.k, PartlyQuantizedKeys):
            v, full_precision = map(one, pages.k)
            return jnp.concatenate([v, full_precision.astype(v.dtype)], axis=-1), v
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
    ) -> StepPlan | None:
        """Prepares `attend` for these rows, once for all layers; None if not needed.

        `dtype` is the dtype of the queries; `window` and `numerics` are those of
        `attend`.
        """
        num_rows = rows.position.shape[0]
        keys = jax.tree.leaves(pages.k)[0]
        width = keys.shape[-1]
        if isinstance(pages.k, PartlyQuantizedKeys):
            width += pages.k.rest.shape[-1]
        shape = jax.ShapeDtypeStruct(keys.shape[1:], keys.dtype)
        return make_plan(
            jax.ShapeDtypeStruct((num_rows, num_q_heads, width), dtype),
            shape,
            _local_view(pages, rows, window),
            value_width=self.value_width,
            numerics=numerics,
        )

    def attend(
        self,
        pages: Pages,
        layer: Layer,
        q: Float[Array, "rows q_heads head_dim"],
        rows: Rows,
        *,
        scoring: ScoreTransform | None = None,
        window: int | None = None,
        numerics: Literal["fast", "reproducible"] = "fast",
        packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None = None,
        plan: StepPlan | None = None,
        own_rows: bool = False,
        long_runs: bool = False,
    ) -> Float[Array, "own q_heads value_width"]:
        """Computes attention of rows over pages that already hold the rows' keys.

        If pages are divided over devices, each device attends over its part, and the
        partial results are merged.

        Args:
          pages: the pages.
          layer: index of the layer.
          q: queries with encoded positions.
          rows: the packed rows.
          scoring: from products to scores; None means a factor of head_dim ** -0.5.
          window: number of latest keys that a row sees; None means all.
          numerics: "reproducible" gives a row the same bits in any batch.
          packed_q: the queries as the plan packs them; None packs them here.
          plan: the result of `plan` for these rows; None makes a plan if one is needed.
          own_rows: True if a device keeps only its part of the rows.
          long_runs: as for `paged_attention`.

        Returns:
          The output of every row that the device keeps, 0 on padding rows.
        """
        if scoring is None:
            scoring = ScoreTransform(q.shape[2] ** -0.5)
        if page_parts.num_page_parts() > 1 and scoring.sinks is not None:
            # Each device would count them.
            raise ValueError("sinks need pages that are not divided over devices")
        keys = flatten_layers(pages.k)
        full_precision = None
        if isinstance(keys, PartlyQuantizedKeys):
            keys, full_precision = keys
        k_pages, k_scales = quantizing.split_quantized(keys)
        v_pages, v_scales = quantizing.split_quantized(flatten_layers(pages.v))
        kv = PagedKV(
            k_pages,
            v_pages,
            k_scales,
            v_scales,
            value_width=self.value_width,
            k_rest=full_precision,
            layer=layer,
            num_layers=pages.num_layers,
        )
        state = paged_attention(
            q,
            kv,
            _local_view(pages, rows, window),
            scoring,
            plan=plan,
            packed_q=packed_q,
            numerics=numerics,
            long_runs=long_runs,
        )
        if page_parts.num_page_parts() > 1:
            merge = merge_own_rows if own_rows else merge_devices
            state = merge(state, page_parts.CONTEXT)
        return state.out

    def specs(self, pages: Pages, *, heads: str) -> PyTree[PartitionSpec | Array]:
        """Returns the partitioning of `k` and `v` over a mesh, as `PartitionSpec`s.

        KV heads are divided over the mesh axis `heads`, unless all query heads share
        one row of keys; token places of a page are divided over `page_parts.CONTEXT`.
        The specs may be a prefix of the tree of the pages.
        """
        axis = heads if self.value_width is None else None
        spec = PartitionSpec(None, None, axis, page_parts.CONTEXT)
        return pages._replace(k=spec, v=spec)


DEFAULT_LAYOUT = KVLayout()
"""K and V in the dtype of the model."""


class WindowLayers(NamedTuple):
    """Layers with a window whose pages have ids of their own, see `Pages.windowed`."""

    num_layers: int
    """Number of these layers, at most that of all."""
    num_pages: int
    """Pages of these layers."""
    window: int
    """Largest window in tokens."""


def make_pages(
    *,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    kv_dtype: Literal["model", "int8", "fp8"] = "model",
    value_width: int | None = None,
    num_features: int = 0,
    num_mixtures: int = 0,
    top_k: int = 0,
    windowed: WindowLayers | None = None,
) -> Pages:
    """Makes pages of K and V, filled with zeros; all sizes are at least 1.

    `dtype` is the dtype of the model, and `kv_dtype` and `value_width` are those of a
    `KVLayout`. If positive, `num_features` numbers per token are kept as well, in the
    model's dtype for any `kv_dtype`. With `num_mixtures`, the `top_k` experts of each
    token in each mixture are kept. Of the layers, `windowed` have pages of their own.

    Returns:
      The pages, with 2 * num_layers * num_pages * num_kv_heads * page_size * head_dim
      elements, half of them with a `value_width`; a scale for every key and value if
      they have 8 bits; and num_pages * page_size * num_features features.

    Raises:
      ValueError: a size is below 1, the dtype is not floating, or memory is too small.
    """
    sizes = dict(
        num_layers=num_layers,
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
    )
    shape = tuple(validation.integer(name, x, low=1) for name, x in sizes.items())
    if shape[0] * shape[1] >= validation.INT32:  # kernels index all layers as one pool
        raise ValueError(f"{num_layers=} times {num_pages=} must be below 2**31")
    dtype = validation.floating("dtype", dtype)
    validation.choice("kv_dtype", kv_dtype, ("model", *quantizing.CODE_DTYPES))
    if value_width is not None:
        validation.integer("value_width", value_width, low=1)
        if value_width > head_dim:
            raise ValueError(f"{value_width=} must be at most {head_dim=}")
    width = validation.integer("num_features", num_features, low=0)
    validation.integer("num_mixtures", num_mixtures, low=0)
    validation.integer("top_k", top_k, low=0)
    if width % 2:
        raise ValueError(f"{num_features=} must be even")
    try:
        layout = KVLayout(kv_dtype, value_width)
        if windowed is None:
            pages = layout.make(shape, dtype)
        else:
            pages = layout.make((shape[0] - windowed.num_layers, *shape[1:]), dtype)
            layout = dataclasses.replace(layout, window=windowed.window)
            size = windowed.num_layers, windowed.num_pages, *shape[2:]
            pages = pages._replace(windowed=layout.make(size, dtype))
        if num_mixtures:
            size = 1, num_pages, num_mixtures, page_size, top_k
            pages = pages._replace(routes=jnp.zeros(size, jnp.int32))
        if not width:
            return pages
        features = jnp.zeros((1, num_pages, 2, page_size, width // 2), dtype)
        return pages._replace(features=features)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"no room for {num_pages=}: {reason}") from None


def change_layout(pages: Pages, layout: KVLayout, dtype: DTypeLike) -> Pages:
    """Makes pages of the same sizes in another layout, for a model of a dtype.

    Raises:
      ValueError: the pages have more than K and V of one form, or another `kv_dtype`.
    """
    plain = Pages(pages.k, pages.v, KVLayout(layout.kv_dtype))
    if jax.tree.structure(pages) != jax.tree.structure(plain):
        raise ValueError(
            f"layout={validation.format_value(layout)} needs pages of K and V only, "
            f"with equal heads and kv_dtype={layout.kv_dtype!r}"
        )
    return layout.make(jax.tree.leaves(pages.k)[0].shape, dtype)


def _local_view(pages: Pages, rows: Rows, window: int | None) -> RowView:
    """Returns the view of the rows on this device's part of the pages."""
    # In a token tree, the context replaces the position as the bound of what is seen.
    position = rows.places if rows.context is None else rows.position
    context = rows.context
    ancestors = rows.ancestors
    if page_parts.num_page_parts() > 1:
        last = functools.partial(page_parts.last_local_place, part=pages.part)
        position = last(position)
    if (
        page_parts.num_page_parts() > 1
        and context is not None
        and ancestors is not None
    ):
        # The tree's places on this device are contiguous columns too, but fewer.
        start = jnp.where(context >= 0, last(context - 1) + 1, -1)
        column = jnp.arange(ancestors.shape[1], dtype=jnp.int32)
        column = page_parts.global_place(
            start[:, None] + column[None, :], part=pages.part
        )
        slot = jnp.maximum(slots_of(rows), 0)
        column = (column - context[:, None])[slot]
        inside = (column >= 0) & (column < ancestors.shape[1])
        kin = jnp.take_along_axis(ancestors, jnp.where(inside, column, 0), axis=1)
        in_tree = context[slot] >= 0
        # The position of a row in a tree only marks that the row is not padding.
        is_row = in_tree & (rows.position >= 0)
        position = jnp.where(is_row, jnp.maximum(position, 0), position)
        context = start
        ancestors = kin & inside & in_tree[:, None]
    return RowView(
        rows.page_ids,
        position,
        rows.slot,
        context,
        ancestors,
        page_parts.local_window(window, part=pages.part),
    )


def can_rotate_and_write(pages: Pages, qkv: Array | jax.ShapeDtypeStruct) -> bool:
    """Returns True if `rotate_and_write` supports a projection of this shape."""
    return (
        dataclasses.replace(pages.layout, window=None) == DEFAULT_LAYOUT
        and choose_rotary_write(qkv, pages.k) != "reference"
    )


@validation.checks_numbers(layer=0)
def rotate_and_write(
    pages: Pages,
    layer: Layer,
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"],
    cos_sin: RotaryCosSin,
    page: Int32[Array, " rows"],
    offset: Int32[Array, " rows"],
    packing: Packing | None = None,
) -> tuple[RotaryWriteOutput, Pages]:
    """Encodes the rows' positions and writes one layer's K and V, in one kernel.

    Equals `DEFAULT_LAYOUT.write`, in place, and requires `can_rotate_and_write`.

    Args:
      pages: the pages, donated or carried.
      layer: index of the layer.
      qkv: projection of every row: queries, key, value of each KV head.
      cos_sin: cosines and sines of every query's angles.
      page: page of each row's K and V, see `locate`.
      offset: place of each row in its page.
      packing: how attention packs the queries; None if it does not.

    Returns:
      The queries, also packed; and the pages.
    """
    written = write_rotated_kv(
        qkv,
        cos_sin,
        flatten_layers(pages.k),
        flatten_layers(pages.v),
        page,
        offset,
        packing=packing,
        layer=layer,
        num_layers=pages.num_layers,
    )
    k, v = (
        unflatten_layers(x, pages.k.shape) for x in (written.k_pages, written.v_pages)
    )
    return written, pages._replace(k=k, v=v)
