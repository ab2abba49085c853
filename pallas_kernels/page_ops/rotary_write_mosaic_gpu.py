"""Rotary positions and the write of K and V for Hopper GPUs: one launch, in place.

A program handles one row. TMA loads the two halves of its queries and keys into
separate shared memory, a warpgroup rotates them, and strided TMA copies write keys and
values to their pages. Queries are also written to the packed blocks that the decode
kernel reads.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import layered, row_packing
from pallas_kernels.devices import Ref
from pallas_kernels.layered import Layer
from pallas_kernels.row_packing import Packing


def write_rotated_kv_mosaic_gpu(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"],
    cos_sin: tuple[
        Float32[Array, "rows kv_heads group half"],
        Float32[Array, "rows kv_heads group half"],
    ],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, " rows"],
    offsets: Int[Array, " rows"],
    *,
    packing: Packing | None = None,
    layer: Layer = 0,
    num_layers: int = 1,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> tuple[Array, Array | None, Array, Array]:
    """Rotates queries and keys, and writes keys and values to pages.

    Args:
      qkv: as for `rotary_write.write_rotated_kv`, like all arguments but `interpret`.
      cos_sin: cosines and sines.
      k_pages: pages of keys; copied unless donated or carried.
      v_pages: pages of values; copied unless donated or carried.
      page_ids: rows with an id out of range are dropped.
      offsets: rows with an offset out of range are dropped.
      packing: blocks to which queries are also written; their padding is undefined.
      layer: index of the layer in the pages.
      num_layers: number of layers in the pages.
      interpret: emulates the kernel on a CPU; False compiles it.

    Returns:
      Queries, packed queries or None, pages of keys, pages of values.
    """
    rows, kv_heads, wide, head_dim = qkv.shape
    (num_pages, _, page_size, _), group = k_pages.shape, wide - 2
    half = head_dim // 2
    dtype = qkv.dtype
    layer_pages = num_pages // num_layers
    low = pl.ds(0, half)
    high = pl.ds(half, half)
    places = [] if packing is None else [packing.block, packing.token]
    num_places = len(places)

    def one_row(*references: Ref) -> None:
        qkv, cos, sin, page_ids, offsets, layer, *others = references
        *places, k_pages, v_pages = others[: num_places + 2]
        q, *packed, q_low, q_high, k_low, k_high, v, arrived = others[num_places + 2 :]
        row = lax.axis_index("row")
        read = qkv.at[row]
        for part, heads, features in (
            (q_low, pl.ds(0, group), low),
            (q_high, pl.ds(0, group), high),
            (k_low, group, low),
            (k_high, group, high),
            (v, group + 1, pl.ds(0, head_dim)),
        ):
            plgpu.copy_gmem_to_smem(read.at[:, heads, features], part, arrived)
        plgpu.barrier_wait(arrived)
        _rotate_pairs(q_low, q_high, cos[row], sin[row])
        _rotate_pairs(k_low, k_high, cos[row, :, 0], sin[row, :, 0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_low, q.at[row, :, :, low])
        plgpu.copy_smem_to_gmem(q_high, q.at[row, :, :, high])
        for blocks in packed:
            block, token = (of_row[row] for of_row in places)
            heads = pl.ds(token * group, group)

            @pl.when(block < blocks.shape[0])
            def _(
                blocks: Ref = blocks, block: Array = block, heads: pl.Slice = heads
            ) -> None:
                plgpu.copy_smem_to_gmem(q_low, blocks.at[block, :, heads, low])
                plgpu.copy_smem_to_gmem(q_high, blocks.at[block, :, heads, high])

        page = page_ids[row]
        place = offsets[row]
        is_page = jnp.logical_and(page >= 0, page < layer_pages)
        is_place = jnp.logical_and(place >= 0, place < page_size)

        @pl.when(jnp.logical_and(is_page, is_place))
        def _() -> None:
            page = layer[0] * layer_pages + page_ids[row]
            plgpu.copy_smem_to_gmem(k_low, k_pages.at[page, :, place, low])
            plgpu.copy_smem_to_gmem(k_high, k_pages.at[page, :, place, high])
            plgpu.copy_smem_to_gmem(v, v_pages.at[page, :, place])

        plgpu.wait_smem_to_gmem(0)

    # A reference to a donated array aliases it.
    written = jax.new_ref(k_pages), jax.new_ref(v_pages)
    ids = [x.astype(jnp.int32) for x in (page_ids, offsets)]
    halves = [(kv_heads, group, half)] * 2 + [(kv_heads, half)] * 2
    wanted = [jax.ShapeDtypeStruct((rows, kv_heads, group, head_dim), dtype)]
    if packing is not None:
        num_blocks, tokens = packing.row.shape
        size = row_packing.num_block_rows(tokens=tokens, group=group)
        packed = num_blocks, kv_heads, size, head_dim
        wanted.append(jax.ShapeDtypeStruct(packed, dtype))
    q, *packed = plgpu.kernel(
        one_row,
        out_type=wanted,
        scratch_types=[
            *(plgpu.SMEM(shape, dtype) for shape in (*halves, (kv_heads, head_dim))),
            plgpu.Barrier(num_arrivals=5),
        ],
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
    )(qkv, *cos_sin, *ids, layered.layer_operand(layer), *places, *written)
    k_pages, v_pages = (jax.freeze(reference) for reference in written)
    return q, packed[0] if packed else None, k_pages, v_pages


def _rotate_pairs(low: Ref, high: Ref, cos: Array, sin: Array) -> None:
    """Rotates pairs of features in shared memory."""
    first = low[...].astype(jnp.float32)
    second = high[...].astype(jnp.float32)
    low[...] = (first * cos - second * sin).astype(low.dtype)
    high[...] = (second * cos + first * sin).astype(high.dtype)
