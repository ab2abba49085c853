"""Rows of a pass divided over devices, for pages that are divided over devices.

Of n packed rows, device d of p has n / p from d n / p on, and computes their
embeddings, norms, products and experts. For attention each device needs the queries,
keys and values of all rows: it writes the keys that belong to its parts of the pages,
attends over these parts, and sends each row's partial result to the device that has the
row. Keys and values of earlier tokens are never sent.

A pass with an equal number of rows per slot, for decoding or verification, is not
divided: it has few rows, and its time is that of reading the weights. A pass whose rows
are not a multiple of p is not divided either.

Source: Yang et al. 2024, arXiv:2411.01783, section 3 (pass-Q); queries and keys here
are gathered at once, not in a ring.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxkv import memory
from jaxkv.memory import CONTEXT, Rows, broadcast_from_owner


class RowParts(NamedTuple):
    """Division of a pass's rows, which are the last axis of every array."""

    num: int = 1
    """Number of devices that divide the rows; 1 keeps all on each device."""

    def shard(self, x: Shaped[Array, "*lead rows"]) -> Shaped[Array, "*lead own"]:
        """Returns this device's part of all rows."""
        if self.num == 1:
            return x
        size = x.shape[-1] // self.num
        return lax.dynamic_slice_in_dim(x, _begin(size), size, axis=-1)

    def gather(self, x: Shaped[Array, "*lead own"]) -> Shaped[Array, "*lead rows"]:
        """Returns all rows, on every device."""
        if self.num == 1:
            return x
        return lax.all_gather(x, CONTEXT, axis=x.ndim - 1, tiled=True)

    def pick(
        self, x: Float[Array, "features own"], wanted: Int32[Array, " n"]
    ) -> Float[Array, "features n"]:
        """Returns some of all rows, on every device; exact in any dtype."""
        if self.num == 1:
            return x[:, wanted]
        local = wanted - _begin(x.shape[-1])
        is_here = (local >= 0) & (local < x.shape[-1])
        columns = x[:, jnp.where(is_here, local, 0)]
        return broadcast_from_owner(
            jnp.where(is_here, columns, jnp.zeros_like(columns))
        )


ALL_ROWS = RowParts()
"""All rows on every device."""


def divide_rows(
    rows: Rows, numerics: Literal["fast", "reproducible"] = "fast"
) -> RowParts:
    """Returns the division of the rows of a pass over the devices that divide pages.

    Packed rows are divided if each device gets an equal number. With reproducible
    numerics, whose passes have one size and include single rows, they are not divided.
    """
    num = memory.num_page_parts()
    num_rows = rows.position.shape[0]
    if rows.slot is None or numerics != "fast" or num_rows % num:
        return ALL_ROWS
    return RowParts(num)


def _begin(size: int) -> Int32[Array, ""]:
    return lax.axis_index(CONTEXT).astype(jnp.int32) * size
