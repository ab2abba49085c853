"""Pages divided over devices by token places: context parallelism.

Of every page of P places, device d of p holds P / p places from d P / p on. Each device
thus has an equal part of every sequence, and operations that copy, share, swap or send
pages run on each device independently. A device's places of a sequence are in token
order: the places that a row sees are the first ones, as in a shorter sequence.

These functions run inside `jax.shard_map` over the axis `CONTEXT`; elsewhere pages are
not divided. vLLM calls this division decode context parallelism.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, PyTree

from jaxkv import validation

CONTEXT = "context"
"""Mesh axis over which pages are divided."""


def num_page_parts() -> int:
    """Returns the number of devices that divide every page, in the current trace."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[CONTEXT] if CONTEXT in mesh.manual_axes else 1


def first_offset(part: int) -> Int32[Array, ""] | int:
    """Returns the first place of each page in this device's part of `part` places."""
    return (
        0 if num_page_parts() == 1 else lax.axis_index(CONTEXT).astype(jnp.int32) * part
    )


def last_local_place(
    place: Int32[Array, "*shape"], *, part: int
) -> Int32[Array, "*shape"]:
    """Returns the last of this device's places that is at or before a sequence's place.

    Args:
      place: place in the sequence, or -1 for the place before the first token.
      part: places of a page on a device.

    Returns:
      Index among this device's places of the sequence; -1 if there is none.
    """
    size = part * num_page_parts()
    inside = jnp.clip(place % size + 1 - first_offset(part), 0, part)
    return place // size * part + inside - 1


def global_place(local: Int32[Array, "*shape"], *, part: int) -> Int32[Array, "*shape"]:
    """Returns the place in the sequence of one of this device's places."""
    return local // part * (part * num_page_parts()) + first_offset(part) + local % part


def local_window(size: int | None, *, part: int) -> int | None:
    """Returns the number of this device's places in a sliding window.

    Raises:
      ValueError: the window is not a multiple of the page size.
    """
    if size is None or num_page_parts() == 1:
        return size
    check_window(size, page_size=part * num_page_parts())
    return size // num_page_parts()


@validation.checks_numbers()
def check_window(size: int | None, *, page_size: int) -> None:
    """Checks that all devices have equal parts of a sliding window.

    Raises:
      ValueError: the window is not a multiple of the page size.
    """
    if size is not None and size % page_size:
        raise ValueError(
            f"window={size} must be a multiple of {page_size=} where pages are divided "
            "over devices"
        )


def broadcast_from_owner(local_rows: PyTree[Array]) -> PyTree[Array]:
    """Returns on all devices the values of the one device that has nonzero values.

    The result is exact for every dtype.
    """
    if num_page_parts() == 1:
        return local_rows

    def one(x: Array) -> Array:
        wide = np.promote_types(x.dtype, np.float32)
        return lax.psum(x.astype(wide), CONTEXT).astype(x.dtype)

    return jax.tree.map(one, local_rows)
