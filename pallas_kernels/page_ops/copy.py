"""Copies of whole pages: checks shapes and chooses an implementation.

Copy-on-write copies a shared page before one of its owners writes to it; swapping
copies pages to host memory and back. A page of all layers is one entry for each layer.
"""

import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels import devices
from pallas_kernels.devices import LINE_BYTES

type CopyImplementation = Literal["reference", "mosaic_gpu"]
"""Names of implementations; `None` means the best one for platform and shape.

"mosaic_gpu" needs a Hopper GPU, pages of a multiple of 128 bytes, and no page that is
both read and written: `disjoint`, or an `origin`.
"""


def copy_pages(
    pages: Shaped[Array, "pages ..."],
    source: Int[Array, " n"],
    target: Int[Array, " n"],
    *,
    origin: Shaped[Array, "origin_pages ..."] | None = None,
    disjoint: bool = False,
    implementation: CopyImplementation | None = None,
) -> Shaped[Array, "pages ..."]:
    """Copies pages onto pages, in place if the pages are donated.

    All sources are read before any target is written, so pages may swap contents.

    Args:
      pages: pages of one layer, or of all layers with ids offset by the layer.
      source: page that each entry reads.
      target: page that each entry overwrites, without duplicates. An entry with either
        id out of range is ignored.
      origin: pages of the same shape and type to read from; None reads from `pages`.
      disjoint: True if the caller guarantees that no page is both source and target.
      implementation: None, or the name of a required one.

    Returns:
      The pages with every target replaced; all other bits are unchanged.

    Raises:
      ValueError: the requested implementation is unknown or does not support the call,
        or `origin` has pages of another shape or type.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    read = pages if origin is None else origin
    if read.shape[1:] != pages.shape[1:] or read.dtype != pages.dtype:
        raise ValueError(
            f"{read.shape[1:]=}, {read.dtype=} must be {pages.shape[1:]=}, "
            f"{pages.dtype=}"
        )

    def why_not_mosaic() -> str | None:
        page_bytes = math.prod(pages.shape[1:]) * pages.dtype.itemsize
        if page_bytes == 0 or page_bytes % LINE_BYTES:
            return f"{page_bytes=} must be a positive multiple of {LINE_BYTES}"
        if not disjoint and origin is None:
            return "pages may be both read and written; set `disjoint` if none is"
        return None

    if devices.choose_implementation(implementation, why_not_mosaic) == "mosaic_gpu":
        from pallas_kernels.page_ops import copy_mosaic_gpu

        return copy_mosaic_gpu.copy_pages_mosaic_gpu(
            pages, source, target, origin=origin
        )
    # The reference: gathers all sources, then scatters.
    is_read = (source >= 0) & (source < read.shape[0])
    content = read.at[source].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    # On a GPU XLA would fuse the gather into the scatter, which would then read the
    # array that it writes and so copy all of it.
    content = lax.optimization_barrier(content)
    return pages.at[jnp.where(is_read, target, -1)].set(
        content, mode="drop", wrap_negative_indices=False
    )
