"""Page ids of one layer in an array that holds the pages of several layers.

Slicing the array by layer would copy it. Page ids are relative to the layer, and the
layer's offset is added where the array is indexed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

type Layer = int | Int32[Array, ""]
"""Index of a layer, in [0, num_layers)."""


def flat_ids(
    page_ids: Int[Array, "..."], layer: Layer, *, num_layers: int, num_pages: int
) -> Int[Array, "..."]:
    """Turns page ids into indices of one layer's pages in an array of all layers.

    Args:
      page_ids: page ids; those outside [0, num_pages) are unmapped.
      layer: index of the layer, in [0, num_layers).
      num_layers: layers in the array.
      num_pages: pages of each layer.

    Returns:
      Indices in [0, num_layers * num_pages); num_layers * num_pages, one past the end,
      for unmapped ids.
    """
    mapped = (page_ids >= 0) & (page_ids < num_pages)
    return jnp.where(mapped, page_ids + layer * num_pages, num_layers * num_pages)


def layer_operand(layer: Layer) -> Int32[Array, " 1"]:
    """Returns the layer as a kernel operand; kernels add its offset themselves."""
    return jnp.asarray(layer, jnp.int32).reshape(1)
