"""Rows of a pass of which every device has a part, where pages are divided.

Of n packed rows device d of p has the n / p from d n / p on, and computes embeddings,
norms, products and experts of these alone. Where rows meet, in attention, each device
needs queries, keys and values of all: it writes those keys that belong to its parts of
the pages, attends over these parts, and sends what it found for the rows of others to
those who have them. Keys and values of earlier tokens stay where they are.

A pass of as many rows for each slot, to decode or to verify drafts, is left whole on
every device: it has few rows, and takes the time to read the weights however many these
are. So is one whose rows do not divide.

Source: Yang et al. 2024, arXiv:2411.01783, section 3 (pass-Q); queries and keys here
are gathered at once, not in a ring.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxkv.memory import page_parts
from jaxkv.memory.kv_pages import Rows
from jaxkv.memory.page_parts import CONTEXT


class RowParts(NamedTuple):
    """How the rows of a pass are divided; they are the last axis of every array."""

    num: int = 1
    """Devices that divide them; 1 leaves all on each."""

    def own(self, x: Shaped[Array, "*lead rows"]) -> Shaped[Array, "*lead own"]:
        """The part of all rows that this device has."""
        if self.num == 1:
            return x
        size = x.shape[-1] // self.num
        return lax.dynamic_slice_in_dim(x, _begin(size), size, axis=-1)

    def whole(self, x: Shaped[Array, "*lead own"]) -> Shaped[Array, "*lead rows"]:
        """All rows, on every device."""
        if self.num == 1:
            return x
        return lax.all_gather(x, CONTEXT, axis=x.ndim - 1, tiled=True)

    def pick(
        self, x: Float[Array, "features own"], wanted: Int32[Array, " n"]
    ) -> Float[Array, "features n"]:
        """Some of all rows, on every device; exact in any type."""
        if self.num == 1:
            return x[:, wanted]
        own = wanted - _begin(x.shape[-1])
        is_here = (own >= 0) & (own < x.shape[-1])
        found = x[:, jnp.where(is_here, own, 0)]
        return page_parts.broadcast_from_owner(
            jnp.where(is_here, found, jnp.zeros_like(found))
        )


WHOLE = RowParts()
"""All rows on every device."""


def divide_rows(
    rows: Rows, numerics: Literal["fast", "reproducible"] = "fast"
) -> RowParts:
    """How the rows of a pass are divided over the devices that divide pages.

    Packed rows are, if there are as many for each device; under reproducible numerics,
    whose passes are of one size and feed single rows, too, none are.
    """
    num, num_rows = page_parts.degree(), rows.position.shape[0]
    if rows.slot is None or numerics != "fast" or num_rows % num:
        return WHOLE
    return RowParts(num)


def _begin(size: int) -> Int32[Array, ""]:
    return lax.axis_index(CONTEXT).astype(jnp.int32) * size
