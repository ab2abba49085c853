"""Expert parallelism: each device has some of the experts, and all devices have tokens.

For functions inside `jax.shard_map` over the axis `EXPERT`. `exchange` sends rows to
the devices of their experts and the outputs back: two all-to-alls of buffers with a
bounded number of places for every expert, so choices beyond the capacity are dropped.
`gather_rows` gathers all rows on every device, which computes the outputs of its
experts; the outputs are summed and scattered. This drops no choice and sends more
bytes.

Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3 (all-to-all, capacity).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkv import models, validation
from jaxkv.models import EXPERT, Routing, expert_load, own_experts


class ExpertPlaces(NamedTuple):
    """Places of the rows' choices in buffers of `capacity` places per expert."""

    row: Int32[Array, " experts_capacity"]
    """Row in each place; the number of rows if the place is empty."""
    place: Int32[Array, "rows top_k"]
    """Place of each choice; the number of places if the choice is dropped."""


def assign_places(
    expert: Int32[Array, "rows top_k"], *, num_experts: int, capacity: int
) -> ExpertPlaces:
    """Assigns places to the choices: first choices before second ones, then by row.

    Args:
      expert: experts of each row, best first, in [0, num_experts).
      num_experts: number of experts.
      capacity: number of places of each expert.
    """
    num_rows, top_k = expert.shape
    chosen = expert.T.reshape(-1)
    every = jnp.arange(num_experts, dtype=chosen.dtype)
    sizes = jnp.sum(chosen[:, None] == every[None, :], axis=0, dtype=jnp.int32)
    start = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    number = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    rank = number - start[chosen[order]]
    rank = jnp.zeros_like(rank).at[order].set(rank, unique_indices=True)
    num_places = num_experts * capacity
    place = jnp.where(rank < capacity, chosen * capacity + rank, num_places)
    row = jnp.full((num_places,), num_rows, jnp.int32)
    row = row.at[place].set(number % num_rows, mode="drop", unique_indices=True)
    return ExpertPlaces(row, place.reshape(top_k, num_rows).T)


@validation.checks_numbers()
def exchange(
    x: Float[Array, "rows width"],
    routing: Routing,
    answer: Callable[
        [Float[Array, "own places width"]], Float[Array, "own places out"]
    ],
    *,
    capacity: int,
) -> Float[Array, "rows out"]:
    """Sends rows to their experts, and sums the outputs by shares.

    Each of p devices sends twice (p - 1) / p of `experts * capacity` rows, and as many
    in the backward pass.

    Args:
      x: this device's rows.
      routing: experts of the rows.
      answer: computes the outputs of this device's experts, each for its own rows;
        empty places have rows of zeros.
      capacity: number of rows that this device sends to an expert at most; choices
        beyond it contribute zero.
    """
    num_experts = routing.probs.shape[1]
    places = assign_places(routing.expert, num_experts=num_experts, capacity=capacity)
    sent = x.at[places.row].get(mode="fill", fill_value=0)
    sent = sent.reshape(num_experts, capacity, -1)
    come = lax.all_to_all(sent, EXPERT, split_axis=0, concat_axis=1, tiled=True)
    back = lax.all_to_all(answer(come), EXPERT, split_axis=1, concat_axis=0, tiled=True)
    back = back.reshape(num_experts * capacity, -1)
    places = back.at[places.place].get(mode="fill", fill_value=0)
    share = routing.share[:, :, None]
    return jnp.sum(places.astype(share.dtype) * share, axis=1).astype(x.dtype)


@validation.checks_numbers()
def gather_rows(
    x: Float[Array, "rows width"],
    routing: Routing,
    answer: Callable[
        [Float[Array, "pairs width"], Int32[Array, " own"]], Float[Array, "pairs out"]
    ],
    *,
    num_own: int,
) -> Float[Array, "rows out"]:
    """Gathers all rows, and scatters the sums of the experts' outputs.

    Each of p devices sends p - 1 times its rows, twice, and as much in the backward
    pass.

    Args:
      x: this device's rows.
      routing: experts of the rows.
      answer: computes the outputs of this device's experts, as in `moe.mix`.
      num_own: number of experts of a device.
    """
    rows, expert, share = jax.tree.map(
        lambda local_rows: lax.all_gather(local_rows, EXPERT, tiled=True),
        (x, routing.expert, routing.share),
    )
    every = Routing(routing.probs, expert, share)
    own_routing = own_experts(every, part=num_own)
    y = models.mix(rows, own_routing, answer)
    return lax.psum_scatter(y, EXPERT, tiled=True)


@validation.checks_numbers()
def dropped_fraction(routing: Routing, *, capacity: int) -> Float[Array, ""]:
    """Returns the fraction of one device's choices that exceed the capacity."""
    load = expert_load(routing) * routing.probs.shape[0]
    over = jnp.maximum(load - jnp.asarray(capacity, load.dtype), jnp.zeros_like(load))
    return jnp.sum(over) / routing.expert.size
