"""Writes of single tokens into pages: checks shapes and scatters.

XLA's scatter is in place if the pages are donated or carried, on CPUs and GPUs.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import quantizing


def write_rows(
    pages: Num[Array, "pages heads page_size width"],
    page_ids: Int[Array, " rows"],
    offsets: Int[Array, " rows"],
    new: Num[Array, "rows heads width"],
    *,
    scales: Float[Array, "pages heads page_size"] | None = None,
) -> tuple[
    Num[Array, "pages heads page_size width"],
    Float[Array, "pages heads page_size"] | None,
]:
    """Writes the key or value of every row to a position of a page, in place.

    No two rows may have the same page and offset. Rows whose page or offset is out of
    range, sentinels included, are dropped.

    Args:
      pages: pages of one layer, or of all layers with ids offset by the layer.
      page_ids: page of each row.
      offsets: position in that page, in [0, page_size).
      new: rows, cast to the type of the pages, quantized for 8-bit ones.
      scales: scales of 8-bit pages, one for each token and head, written with the
        numbers. Scales of whole pages do not allow adding rows, see `quantizing`.

    Returns:
      The pages and scales with the rows written, unchanged elsewhere.

    Raises:
      ValueError: the scales do not match the pages.
    """
    kind = quantizing.quantization_kind(pages.dtype)
    if (kind is None) != (scales is None):
        raise ValueError(
            f"scales must be given for 8-bit pages, and only for them: {pages.dtype=}"
        )
    if scales is not None and scales.shape != pages.shape[:3]:
        raise ValueError(
            f"{scales.shape=} must be {pages.shape[:3]}, one for each token and head"
        )
    if page_ids.shape[0] == 1:
        # XLA turns an update of one row into a select between the row and the old
        # content, which reads the pages once more, and copies all of them on a CPU.
        page_ids, offsets, new = (
            jnp.concatenate([x, jnp.full_like(x, -1)]) for x in (page_ids, offsets, new)
        )

    def put(pages: Array, new: Array) -> Array:
        return pages.at[page_ids, :, offsets].set(
            new.astype(pages.dtype), mode="drop", wrap_negative_indices=False
        )

    if kind is None or scales is None:
        return put(pages, new), None
    numbers, worth = quantizing.quantize(new, kind)
    if pages.dtype == quantizing.FP8:
        numbers = quantizing.as_number_type(numbers)
    return put(pages, numbers), put(scales, worth)
