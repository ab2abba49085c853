"""Rotary positions and the write of K and V to pages, fused.

Reads the output of a layer's QKV projection once: rotates queries and keys by their
positions, writes keys and values to their pages in place, and returns the queries. On a
GPU it is one launch, where XLA takes eight.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import devices, layered, row_packing
from pallas_kernels.layered import Layer
from pallas_kernels.page_ops.write import write_rows
from pallas_kernels.quantizing import QuantizedArray
from pallas_kernels.row_packing import Packing

type RotaryWriteImplementation = Literal["reference", "mosaic_gpu"]
"""Names of implementations; `None` means the best one for platform and shape.

"mosaic_gpu" needs a Hopper GPU, 16-bit pages of the projection's type, and KV heads
times half of head_dim that is a multiple of 128.
"""


class RotaryWriteOutput(NamedTuple):
    """Queries of a layer, and the pages with the new keys and values."""

    q: Float[Array, "rows kv_heads group head_dim"]
    packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None
    """The queries packed into blocks, if a packing is given; padding is undefined."""
    k_pages: Float[Array, "pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "pages kv_heads page_size head_dim"]


class RotaryCosSin(NamedTuple):
    """Cosines and sines of the rotary angles, repeated over heads."""

    cos: Float32[Array, "rows kv_heads group half"]
    sin: Float32[Array, "rows kv_heads group half"]


def write_rotated_kv(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"],
    cos_sin: RotaryCosSin,
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, " rows"],
    offsets: Int[Array, " rows"],
    *,
    packing: Packing | None = None,
    layer: Layer = 0,
    num_layers: int = 1,
    implementation: RotaryWriteImplementation | None = None,
) -> RotaryWriteOutput:
    """Rotates queries and keys, and writes keys and values to pages.

    Feature i of the first half of a head is rotated with feature i of the second half.

    Args:
      qkv: queries of the group, key and value of each row and KV head.
      cos_sin: cosines and sines, computed once for all layers.
      k_pages: keys of one layer, or of `num_layers` layers concatenated.
      v_pages: values in the same layout.
      page_ids: page of each row's key and value, relative to the layer.
      offsets: position in that page, in [0, page_size). No two rows may have the same
        page and offset; a row with either out of range is dropped.
      packing: blocks to which queries are also written, as the decode kernel reads
        them.
      layer: index of the layer in the pages, in [0, num_layers).
      num_layers: number of layers in the pages.
      implementation: None, or the name of a required one.

    Returns:
      Queries in the type of `qkv`, and the pages, unchanged elsewhere.

    Raises:
      ValueError: the width of pages is not that of the projection's heads, or the
        requested implementation is unknown or does not support the call.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34; the halves are GPT-NeoX's.
    """
    if not k_pages.shape[3] == v_pages.shape[3] == qkv.shape[3]:
        raise ValueError(
            f"{k_pages.shape[3]=} and {v_pages.shape[3]=} must be {qkv.shape[3]=}"
        )
    if choose_rotary_write(qkv, k_pages, implementation) == "mosaic_gpu":
        from pallas_kernels.page_ops import rotary_write_mosaic_gpu as kernel

        return RotaryWriteOutput(
            *kernel.write_rotated_kv_mosaic_gpu(
                qkv,
                cos_sin,
                k_pages,
                v_pages,
                page_ids,
                offsets,
                packing=packing,
                layer=layer,
                num_layers=num_layers,
            )
        )
    turned = apply_rotary(qkv[:, :, :-1], cos_sin)
    q = turned[:, :, :-1]
    k = turned[:, :, -1]
    v = qkv[:, :, -1]
    num_pages = k_pages.shape[0] // num_layers
    ids = layered.flat_ids(page_ids, layer, num_layers=num_layers, num_pages=num_pages)
    k_pages, _ = write_rows(k_pages, ids, offsets, k)
    v_pages, _ = write_rows(v_pages, ids, offsets, v)
    packed = None
    if packing is not None:
        (rows, kv_heads, _, head_dim) = q.shape
        by_head = q.reshape(rows, -1, head_dim)
        packed = row_packing.pack_queries(by_head, packing, kv_heads=kv_heads)
    return RotaryWriteOutput(q, packed, k_pages, v_pages)


def query_rows(num_rows: int, q_heads: int) -> Int32[Array, " queries"]:
    """Returns the row of every query, the index of its angles in `RotaryCosSin`.

    Registers of a warpgroup cannot broadcast over heads, so the kernel reads an angle
    for every query from the cache. Computing the angles from positions gathered at
    these rows takes one XLA kernel; broadcasting angles over heads would take another
    one.
    """
    return jnp.arange(num_rows * q_heads, dtype=jnp.int32) // q_heads


def apply_rotary(
    x: Float[Array, "rows kv_heads heads head_dim"], cos_sin: RotaryCosSin
) -> Float[Array, "rows kv_heads heads head_dim"]:
    """Rotates every pair of features, in float32."""
    cos, sin = (values[:, :1, :1] for values in cos_sin)
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def choose_rotary_write(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Array | QuantizedArray | jax.ShapeDtypeStruct,
    implementation: RotaryWriteImplementation | None = None,
) -> RotaryWriteImplementation:
    """Returns the implementation that computes a call; pages may have 8 bits.

    Raises:
      ValueError: the requested implementation is unknown or does not support the call.
    """
    return devices.choose_implementation(
        implementation, lambda: rotary_write_unsupported_reason(qkv, k_pages)
    )


def rotary_write_unsupported_reason(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Array | QuantizedArray | jax.ShapeDtypeStruct,
) -> str | None:
    """Returns why the Mosaic GPU kernel does not support a call, or None if it does."""
    if str(qkv.dtype) not in ("bfloat16", "float16") or qkv.dtype != k_pages.dtype:
        return (
            f"{qkv.dtype=} and {k_pages.dtype=} must both be bfloat16, or both float16"
        )
    _, kv_heads, _, head_dim = qkv.shape
    if head_dim % 16 or kv_heads * head_dim // 2 % devices.GROUP_THREADS:
        return (
            f"{kv_heads=} times half of {head_dim=} must be a multiple of "
            f"{devices.GROUP_THREADS}"
        )
    return None
