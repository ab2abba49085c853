"""Who is preempted when pages run out: an order of the running requests."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv import arrays
from jaxkv.scheduling import interface
from jaxkv.scheduling.interface import Counts

type Victim = Literal[
    "latest",
    "least_computed",
    "fewest_pages",
    "cheapest",
    "least_urgent",
    "longest_remaining",
]
"""Rules by name, see `ranks`."""

NAMES: tuple[str, ...] = get_args(Victim.__value__)

_LAST = 2**31 - 1
"""Key of a request that is never preempted."""


def ranks(
    counts: Counts,
    victim: Int32[Array, ""],
    shortage: Int32[Array, ""],
    frees: Int32[Array, " order"],
    cost: Int32[Array, " order"],
) -> Int32[Array, " order"]:
    """Ranks the places: those of the highest ranks are preempted first.

    The first request in order always ranks lowest, so there is always progress. Among
    equals the later one goes first. The rules:

      latest          last come, first to go, whatever it costs (Kwon et al. 2023)
      least_computed  fewest tokens that would be computed again
      fewest_pages    fewest pages released
      cheapest        of the requests that alone end the shortage, the one of least
                      cost; where there is none, the one that releases most
      least_urgent    the largest `RequestAttributes.priority`
      longest_remaining  the most tokens left to its predicted length

    Args:
      counts: the counts.
      victim: index into `NAMES`.
      shortage: pages that are missing.
      frees: pages that each place would leave to others, were its group preempted;
        summed over groups here, like the next.
      cost: what that would cost, in tokens to compute again or in pages to move.

    Returns:
      The ranks: places of one group side by side, none twice.
    """
    c = counts

    def by_group(values: Array) -> Array:
        return arrays.reduce_groups(jnp.where(c.running, values, 0), c.group, "add")

    a = interface.attributes_of(c.attributes)
    frees, price = by_group(frees), by_group(cost)
    enough = frees >= shortage
    keys = jnp.stack(
        [
            jnp.zeros_like(frees),
            by_group(c.owned_tokens),
            by_group(c.owned_pages),
            jnp.where(enough, price, _LAST // 2 - frees),
            -jnp.broadcast_to(jnp.asarray(a.priority, jnp.int32), frees.shape),
            -by_group(a.predicted_length - c.length),
        ]
    )
    place = jnp.arange(c.running.shape[0], dtype=jnp.int32)
    first = jnp.argmax(c.running).astype(jnp.int32)
    if c.group is None:
        is_first = c.running & (place == first)
    else:
        is_first = c.running & (c.group == c.group[first])
    key = jnp.where(is_first, _LAST, keys[victim])
    before = (key[:, None] > key[None, :]) | (
        (key[:, None] == key[None, :]) & (place[:, None] < place[None, :])
    )
    return jnp.sum(before, axis=0, dtype=jnp.int32)
