"""The door to copies of whole pages: checks shapes, then picks an implementation.

Pages that are about to be written by one of several owners are copied first; so are
pages on their way to host memory and back. Kernels know pages and nothing above them:
a page of every layer is as many entries as there are layers.
"""

import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels import devices
from pallas_kernels.devices import LINE_BYTES

type CopyImplementation = Literal["reference", "mosaic_gpu"]
"""Implementations by name; `None` takes the best one for platform and shape.

"mosaic_gpu" needs a Hopper GPU, pages of a multiple of 128 bytes, and that no page is
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
    """Makes some pages equal to others, in place where the pages are donated.

    All sources are read before any target is written, so pages may swap places.

    Args:
      pages: pages of one layer, or of all layers with ids offset by the layer.
      source: page that each entry reads.
      target: page that it overwrites, no page twice. An entry with either id out of
        range does nothing.
      origin: pages of the same shape and type to read from; None reads from `pages`.
      disjoint: promises that no page is both a source and a target.
      implementation: None, or a name that must serve this call.

    Returns:
      The pages with every target replaced; all others bit for bit as before.

    Raises:
      ValueError: an implementation that is unknown or does not take this call, or
        `origin` has pages of another kind.

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
            return "pages may be both read and written; say `disjoint` if none is"
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
    # On a GPU the gather would become part of the scatter, which would then read the
    # array that it writes and so need a copy of all of it.
    content = lax.optimization_barrier(content)
    return pages.at[jnp.where(is_read, target, -1)].set(
        content, mode="drop", wrap_negative_indices=False
    )
