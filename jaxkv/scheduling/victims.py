"""Preemption rules: the order in which running requests are preempted."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv import arrays
from jaxkv.scheduling import interface
from jaxkv.scheduling.interface import LAST_KEY, Counts

type Victim = Literal[
    "latest",
    "least_computed",
    "fewest_pages",
    "cheapest",
    "least_urgent",
    "longest_remaining",
]
"""Name of a preemption rule, see `rank_victims`."""

VICTIM_NAMES: tuple[str, ...] = get_args(Victim.__value__)


def rank_victims(
    counts: Counts,
    victim: Int32[Array, ""],
    shortage: Int32[Array, ""],
    frees: Int32[Array, " order"],
    cost: Int32[Array, " order"],
) -> Int32[Array, " order"]:
    """Ranks the slots; those with the highest ranks are preempted first.

    The first request in order has the lowest rank for every rule, which guarantees
    progress. Of equal requests the later one is preempted first. The rules:

      latest          the request admitted last (Kwon et al. 2023)
      least_computed  the fewest tokens to recompute
      fewest_pages    the fewest pages released
      cheapest        the least cost among requests that release enough pages; if there
                      is none, the one that releases most pages
      least_urgent    the largest `RequestAttributes.priority`
      longest_remaining  the most tokens left to the predicted length

    Args:
      counts: the counts.
      victim: index into `VICTIM_NAMES`.
      shortage: number of missing pages.
      frees: pages that preemption of each slot would release; summed over groups here.
      cost: cost of preemption of each slot, in tokens to recompute or pages to move;
        summed over groups here.

    Returns:
      The ranks, all distinct; slots of one group have consecutive ranks.
    """
    c = counts

    def by_group(values: Array) -> Array:
        return arrays.reduce_groups(jnp.where(c.running, values, 0), c.group, "add")

    a = interface.attributes_of(c.attributes)
    frees = by_group(frees)
    price = by_group(cost)
    enough = frees >= shortage
    keys = jnp.stack(
        [
            jnp.zeros_like(frees),
            by_group(c.owned_tokens),
            by_group(c.owned_pages),
            jnp.where(enough, price, LAST_KEY // 2 - frees),
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
    key = jnp.where(is_first, LAST_KEY, keys[victim])
    before = (key[:, None] > key[None, :]) | (
        (key[:, None] == key[None, :]) & (place[:, None] < place[None, :])
    )
    return jnp.sum(before, axis=0, dtype=jnp.int32)
