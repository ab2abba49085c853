"""The door to writes of single tokens into pages: checks shapes, then scatters.

XLA's scatter is in place where the pages are donated or carried, on CPUs and GPUs.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import quantizing


class Written(NamedTuple):
    """Pages after a write."""

    k_pages: Num[Array, "pages kv_heads page_size head_dim"]
    v_pages: Num[Array, "pages kv_heads page_size head_dim"]
    k_scales: Float[Array, "pages kv_heads page_size"] | None = None
    v_scales: Float[Array, "pages kv_heads page_size"] | None = None


def write_kv(
    k_pages: Num[Array, "pages kv_heads page_size head_dim"],
    v_pages: Num[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, " rows"],
    offsets: Int[Array, " rows"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    *,
    k_scales: Float[Array, "pages kv_heads page_size"] | None = None,
    v_scales: Float[Array, "pages kv_heads page_size"] | None = None,
) -> Written:
    """Writes the key and value of every row to a place of a page, in place.

    No two rows may name the same place. Rows whose page or offset is out of range,
    sentinels included, are dropped.

    Args:
      k_pages: keys of one layer, or of all layers with ids offset by the layer.
      v_pages: values, likewise.
      page_ids: page that each row goes to.
      offsets: its place there, in [0, page_size).
      k: keys, cast to the type of floating pages, quantised for 8-bit ones.
      v: values, likewise.
      k_scales: of 8-bit pages, one for each token; written with the numbers. Scales of
        whole pages cannot be kept while rows are added, see `quantizing`.
      v_scales: likewise.

    Returns:
      The pages and scales with the rows written; the rest bit for bit as before.

    Raises:
      ValueError: scales that do not fit the pages.
    """
    if page_ids.shape[0] == 1:
        # XLA makes an update of one row a select between the row and what stands there,
        # reads the pages once more for it, and copies all of them on a CPU.
        page_ids, offsets, k, v = (
            jnp.concatenate([x, jnp.full_like(x, -1)])
            for x in (page_ids, offsets, k, v)
        )

    def one(
        name: str, pages: Array, scales: Array | None, new: Array
    ) -> tuple[Array, Array | None]:
        kind = quantizing.kind_of(pages.dtype)
        if (kind is None) != (scales is None):
            raise ValueError(
                f"{name}_scales must be given for 8-bit pages, and for those alone: "
                f"{name}_pages.dtype={pages.dtype}"
            )
        if kind is None or scales is None:
            return put(pages, new), None
        if scales.shape != pages.shape[:3]:
            raise ValueError(
                f"{name}_scales.shape={scales.shape} must be {pages.shape[:3]}, one "
                "for each token"
            )
        numbers, worth = quantizing.quantize(new, kind)
        if pages.dtype == quantizing.FP8:
            numbers = quantizing.meaning(numbers)
        return put(pages, numbers), put(scales, worth)

    def put(pages: Array, new: Array) -> Array:
        return pages.at[page_ids, :, offsets].set(
            new.astype(pages.dtype), mode="drop", wrap_negative_indices=False
        )

    k_pages, k_scales = one("k", k_pages, k_scales, k)
    v_pages, v_scales = one("v", v_pages, v_scales, v)
    return Written(k_pages, v_pages, k_scales, v_scales)
