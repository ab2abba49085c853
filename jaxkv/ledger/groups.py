"""Groups: the sequences of one request, which have adjacent slots."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.ledger.state import NO_SEQUENCE


class Groups(NamedTuple):
    """The groups of a running batch."""

    first: Int32[Array, " slots"]
    """First slot of each one's request; its own if the slot is empty."""
    is_first: Bool[Array, " slots"]
    """True in that slot, and in an empty one."""

    def any(self, mask: Bool[Array, " slots"]) -> Bool[Array, " slots"]:
        """Marks every slot of a group of which any is marked."""
        return arrays.reduce_groups(mask, self.first, "max")

    def total(self, values: Int32[Array, " slots"]) -> Int32[Array, " slots"]:
        """Sums over each group, in all of its slots."""
        return arrays.reduce_groups(values, self.first, "add")

    def before(self, mask: Bool[Array, " slots"]) -> Int32[Array, " slots"]:
        """Counts the marked slots of the same group at lower indices."""
        before = jnp.cumsum(mask, dtype=jnp.int32) - mask.astype(jnp.int32)
        return before - before[self.first]


def find_groups(request: Int32[Array, " slots"]) -> Groups:
    """Finds the groups of slots by the request of each one, `NO_SEQUENCE` if empty."""
    every = jnp.arange(request.shape[0], dtype=jnp.int32)
    exists = request >= 0
    # A sequence that ends before the last one of its group leaves a gap.
    last = lax.cummax(jnp.where(exists, every, NO_SEQUENCE))
    last = jnp.concatenate([jnp.full_like(last, NO_SEQUENCE, shape=(1,)), last[:-1]])
    is_first = ~exists | (request != arrays.take(request, last, fill=NO_SEQUENCE))
    first = lax.cummax(jnp.where(exists & is_first, every, 0))
    return Groups(jnp.where(exists, first, every), is_first)
