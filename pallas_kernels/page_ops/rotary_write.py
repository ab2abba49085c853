"""The door to rotary positions and the write of K and V: one pass over a projection.

What a layer's product for queries, keys and values gives is read once: queries and keys
turn with their positions, keys and values go to their pages, in place, and the queries
come back. On a GPU it is one launch where XLA takes eight.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.page_ops.write import write_kv

type RotaryWriteImplementation = Literal["reference", "mosaic_gpu"]
"""Implementations by name; `None` takes the best one for platform and shape.

"mosaic_gpu" needs a Hopper GPU, 16-bit pages of the projection's type, and KV heads
times half of head_dim a multiple of 128.
"""


class Rotated(NamedTuple):
    """A layer's queries, and the pages with its keys and values."""

    q: Float[Array, "rows kv_heads group head_dim"]
    k_pages: Float[Array, "pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "pages kv_heads page_size head_dim"]


def rotate_and_write(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, " rows"],
    offsets: Int[Array, " rows"],
    *,
    implementation: RotaryWriteImplementation | None = None,
) -> Rotated:
    """Turns queries and keys by their angles; writes keys and values to their places.

    Feature i of a head's first half turns with feature i of its second.

    Args:
      qkv: of each row and KV head the group's queries, the key, the value.
      cos: cosine of every pair's angle.
      sin: its sine.
      k_pages: keys of one layer, or of all layers with ids offset by the layer.
      v_pages: values, likewise.
      page_ids: page that each row's key and value go to.
      offsets: their place there, in [0, page_size). No two rows may name the same
        place; a row whose page or offset is out of range is dropped.
      implementation: None, or a name that must serve this call.

    Returns:
      Queries in the type of `qkv`; the pages, all else in them bit for bit as before.

    Raises:
      ValueError: an implementation that is unknown or does not take this call.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34; the halves are GPT-NeoX's.
    """
    chosen = devices.choose(implementation, lambda: why_not(qkv, k_pages))
    if chosen == "mosaic_gpu":
        from pallas_kernels.page_ops import rotary_write_mosaic_gpu as kernel

        return Rotated(
            *kernel.rotate_and_write(qkv, cos, sin, k_pages, v_pages, page_ids, offsets)
        )
    turned = rotate(qkv[:, :, :-1], cos, sin)
    k, v = turned[:, :, -1], qkv[:, :, -1]
    written = write_kv(k_pages, v_pages, page_ids, offsets, k, v)
    return Rotated(turned[:, :, :-1], written.k_pages, written.v_pages)


def rotate(
    x: Float[Array, "rows kv_heads heads head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
) -> Float[Array, "rows kv_heads heads head_dim"]:
    """Turns every pair of features, in the angles' type."""
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def why_not(
    qkv: Float[Array, "rows kv_heads group_and_2 head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
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
