"""Pages of which every device has a part: context parallelism.

Of every page of P places device d of p has the P / p from d P / p on. So each device
has an even part of every sequence, all pages that belong together lie together, and
whatever copies, shares, swaps or sends pages does so on each device by itself. What a
device has of a sequence lies in token order: all that a row sees of it are the first
places, as of a shorter sequence.

For functions inside `jax.shard_map` over the axis `CONTEXT`; elsewhere pages are whole.
Splitting by places as here is what vLLM calls decode context parallelism.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

CONTEXT = "context"
"""The axis of the mesh over which pages are divided."""


def degree() -> int:
    """Devices that divide every page here, by where in a program this is asked."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[CONTEXT] if CONTEXT in mesh.manual_axes else 1


def first_offset(part: int) -> Int32[Array, ""] | int:
    """The first place, of each page, of the `part` that this device has."""
    return 0 if degree() == 1 else lax.axis_index(CONTEXT).astype(jnp.int32) * part


def last_local_place(
    place: Int32[Array, "*shape"], *, part: int
) -> Int32[Array, "*shape"]:
    """The last of this device's places that is not behind a place of the sequence.

    Args:
      place: from -1 on, before the first token.
      part: places of a page that a device has.

    Returns:
      Its number among those that the device has of the sequence; -1 if there is none.
    """
    size = part * degree()
    inside = jnp.clip(place % size + 1 - first_offset(part), 0, part)
    return place // size * part + inside - 1


def global_place(own: Int32[Array, "*shape"], *, part: int) -> Int32[Array, "*shape"]:
    """The place in the sequence of one of this device's places."""
    return own // part * (part * degree()) + first_offset(part) + own % part


def local_window(size: int | None, *, part: int) -> int | None:
    """How many of this device's places are in a window of so many.

    Raises:
      ValueError: not as many in every window, as it is not of full pages.
    """
    if size is None or degree() == 1:
        return size
    check_window(size, page_size=part * degree())
    return size // degree()


def check_window(size: int | None, *, page_size: int) -> None:
    """Refuses a window of which devices have unequal parts.

    Raises:
      ValueError: it is not of full pages.
    """
    if size is not None and size % page_size:
        raise ValueError(
            f"window={size} must be a multiple of {page_size=} where pages are divided "
            "over devices"
        )


def broadcast_from_owner(found: Any) -> Any:
    """What the one device has that does not have zeros, on all; exact in any type."""
    if degree() == 1:
        return found

    def one(x: Array) -> Array:
        wide = np.promote_types(x.dtype, np.float32)
        return lax.psum(x.astype(wide), CONTEXT).astype(x.dtype)

    return jax.tree.map(one, found)
