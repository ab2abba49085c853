"""The door to copies of whole pages: checks shapes, then picks an implementation.

Pages that are about to be written by one of several owners are copied first; so are
pages on their way to host memory and back. Kernels know pages and nothing above them:
a page of every layer is as many entries as there are layers.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

type CopyImplementation = Literal["reference"]
"""Implementations by name; `None` takes the best one for platform and shape."""


def copy_pages(
    pages: Shaped[Array, "pages ..."],
    source: Int[Array, " n"],
    target: Int[Array, " n"],
    *,
    origin: Shaped[Array, "origin_pages ..."] | None = None,
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
      implementation: None, or a name that must serve this call.

    Returns:
      The pages with every target replaced; all others bit for bit as before.

    Raises:
      ValueError: an unknown implementation, or `origin` has pages of another kind.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """
    if implementation not in (None, "reference"):
        raise ValueError(f"{implementation=} must be None or 'reference'")
    origin = pages if origin is None else origin
    if origin.shape[1:] != pages.shape[1:] or origin.dtype != pages.dtype:
        raise ValueError(
            f"{origin.shape[1:]=}, {origin.dtype=} must be {pages.shape[1:]=}, "
            f"{pages.dtype=}"
        )
    read = (source >= 0) & (source < origin.shape[0])
    content = origin.at[source].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    return pages.at[jnp.where(read, target, -1)].set(
        content, mode="drop", wrap_negative_indices=False
    )
