"""The door to rotary positions and the write of K and V: one pass over a projection.

What a layer's product for queries, keys and values gives is read once: queries and keys
turn with their positions, keys and values go to their pages, in place, and the queries
come back. On a GPU it is one launch where XLA takes eight.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import devices, layered, row_packing
from pallas_kernels.layered import Layer
from pallas_kernels.page_ops.write import write_rows
from pallas_kernels.row_packing import Packing

type RotaryWriteImplementation = Literal["reference", "mosaic_gpu"]
"""Implementations by name; `None` takes the best one for platform and shape.

"mosaic_gpu" needs a Hopper GPU, 16-bit pages of the projection's type, and KV heads
times half of head_dim a multiple of 128.
"""


class RotaryWriteOutput(NamedTuple):
    """A layer's queries, and the pages with its keys and values."""

    q: Float[Array, "rows kv_heads group head_dim"]
    packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None
    """The same where a packing is given; between them anything."""
    k_pages: Float[Array, "pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "pages kv_heads page_size head_dim"]


class RotaryCosSin(NamedTuple):
    """By how much the pairs of features of every query turn: all heads alike."""

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
    """Turns queries and keys by their angles; writes keys and values to their places.

    Feature i of a head's first half turns with feature i of its second.

    Args:
      qkv: of each row and KV head the group's queries, the key, the value.
      cos_sin: their cosines and sines, worked out once for all layers.
      k_pages: keys of one layer, or of `num_layers` one after another.
      v_pages: values, likewise.
      page_ids: page that each row's key and value go to, counted from the layer's
        first.
      offsets: their place there, in [0, page_size). No two rows may name the same
        place; a row whose page or offset is out of range is dropped.
      packing: blocks that queries are laid out in, too, as decode reads them.
      layer: which of the layers in the pages, in [0, num_layers).
      num_layers: how many these are.
      implementation: None, or a name that must serve this call.

    Returns:
      Queries in the type of `qkv`; the pages, all else in them bit for bit as before.

    Raises:
      ValueError: pages of keys or values of another width than the projection's heads,
        or an implementation that is unknown or does not take this call.

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
    q, k, v = turned[:, :, :-1], turned[:, :, -1], qkv[:, :, -1]
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
    """Row of every query, whose angles `RotaryCosSin` has, row by row.

    A warpgroup's registers know no broadcast over heads: they read the angles from the
    cache. Whoever works them out query by query from positions taken at these rows has
    one kernel; heads that share an angle would have it worked out before, in another.
    """
    return jnp.arange(num_rows * q_heads, dtype=jnp.int32) // q_heads


def apply_rotary(
    x: Float[Array, "rows kv_heads heads head_dim"], cos_sin: RotaryCosSin
) -> Float[Array, "rows kv_heads heads head_dim"]:
    """Turns every pair of features, in float32."""
    cos, sin = (values[:, :1, :1] for values in cos_sin)
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def choose_rotary_write(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Any,
    implementation: RotaryWriteImplementation | None = None,
) -> RotaryWriteImplementation:
    """Names the implementation that serves a call; pages may be of 8 bits.

    Raises:
      ValueError: one is asked for that is unknown, or that cannot serve the call.
    """
    return devices.choose_implementation(
        implementation, lambda: rotary_write_unsupported_reason(qkv, k_pages)
    )


def rotary_write_unsupported_reason(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Any,
) -> str | None:
    """Says in a clause why the Mosaic GPU kernel does not take a call, or None."""
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
