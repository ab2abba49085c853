"""Pages of several layers, one after another in one array: which of them an id means.

An array is never cut by layers, which would copy it: ids of pages count from a layer's
start, and where an array is indexed the layer is added.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

type Layer = int | Int32[Array, ""]
"""Number of a layer, in [0, num_layers)."""


def flat_ids(
    page_ids: Int[Array, "..."], layer: Layer, *, num_layers: int, num_pages: int
) -> Int[Array, "..."]:
    """Turns page ids into indices of one layer's pages in an array of all layers.

    Args:
      page_ids: ids; those outside [0, num_pages) are unmapped.
      layer: in [0, num_layers).
      num_layers: layers in the array.
      num_pages: pages of each.

    Returns:
      Indices in [0, num_layers * num_pages); unmapped ones are num_layers * num_pages,
      one past the end.
    """
    mapped = (page_ids >= 0) & (page_ids < num_pages)
    return jnp.where(mapped, page_ids + layer * num_pages, num_layers * num_pages)


def layer_operand(layer: Layer) -> Int32[Array, " 1"]:
    """The layer as kernels take it, who do what `flat_ids` does where they read."""
    return jnp.asarray(layer, jnp.int32).reshape(1)
