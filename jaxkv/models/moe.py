"""Mixtures of experts: which experts a token meets, and how evenly they are met.

Rows are routed one by one, without a capacity: every row reaches all the experts that
it chose, however many others chose the same. Sorted by expert the rows are runs, which
`pallas_kernels.grouped` multiplies by their experts' weights in one call.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


class Routing(NamedTuple):
    """Where the rows go."""

    probs: Float[Array, "rows experts"]
    """Softmax over all experts, at least float32."""
    expert: Int32[Array, "rows top_k"]
    """The most probable ones, best first; of equals, the one with the lower number."""
    share: Float[Array, "rows top_k"]
    """What each one's answer is multiplied by."""


def route(
    scores: Float[Array, "rows experts"], *, top_k: int, renormalise: bool
) -> Routing:
    """Chooses the experts of every row.

    With p the softmax of the scores and T the `top_k` largest of it, expert i of T has
    the share p_i / sum_{j in T} p_j, which is the softmax over T alone; or p_i, if not
    renormalised. Scores 2, 1, 0 and two experts: shares 0.7311 and 0.2689; without
    renormalising 0.6652 and 0.2447.

    Args:
      scores: the router's logits.
      top_k: experts of a row, in [1, experts].
      renormalise: whether a row's shares sum to one.

    Source: Shazeer et al. 2017, arXiv:1701.06538, equations 3-5; Jiang et al. 2024,
    arXiv:2401.04088, section 2.1.
    """
    probs = jax.nn.softmax(scores, axis=1)
    share, expert = lax.top_k(probs, top_k)
    if renormalise:
        share = share / jnp.sum(share, axis=1, keepdims=True)
    return Routing(probs, expert, share)


def mix(
    x: Float[Array, "rows width"],
    routing: Routing,
    answer: Callable[
        [Float[Array, "pairs width"], Int32[Array, " experts"]],
        Float[Array, "pairs out"],
    ],
    *,
    live: Bool[Array, " rows"] | None = None,
) -> Float[Array, "rows out"]:
    """Has every row answered by its experts, and adds the answers up by their shares.

    Args:
      x: the rows.
      routing: where they go.
      answer: computes what the experts answer, from pairs of row and expert, sorted by
        expert, and the number of pairs of each expert. The pairs of rows that are not
        live come last and belong to nobody.
      live: rows that are somebody's, None for all. The others reach no expert, so they
        cost no product; what they get means nothing.

    Returns:
      The sums, of the type of `x`. They are made in at least float32, a row's always in
      the order of its own choice: never does one row depend on another.
    """
    num_rows, num_experts = routing.probs.shape
    top_k = routing.expert.shape[1]
    expert = routing.expert
    if live is not None:
        expert = jnp.where(live[:, None], expert, num_experts)
    expert = expert.reshape(-1)
    every = jnp.arange(num_experts, dtype=expert.dtype)
    sizes = jnp.sum(expert[:, None] == every[None, :], axis=0, dtype=jnp.int32)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    pairs = jnp.arange(expert.shape[0], dtype=jnp.int32)
    place = jnp.zeros_like(pairs).at[order].set(pairs, unique_indices=True)
    # Repeated, then permuted: a gradient is then summed in a fixed order on any device.
    repeated = jnp.broadcast_to(x[:, None, :], (num_rows, top_k, x.shape[1]))
    found = answer(_permute(repeated.reshape(-1, x.shape[1]), order), sizes)
    found = _permute(found, place).reshape(num_rows, top_k, -1)
    share = routing.share[:, :, None]
    return jnp.sum(found.astype(share.dtype) * share, axis=1).astype(x.dtype)


def expert_load(routing: Routing) -> Float[Array, " experts"]:
    """Share of the rows that each expert is chosen by; sums to `top_k`."""
    num_rows, num_experts = routing.probs.shape
    every = jnp.arange(num_experts, dtype=routing.expert.dtype)
    chosen = routing.expert.reshape(-1)[:, None] == every[None, :]
    return jnp.sum(chosen, axis=0, dtype=routing.probs.dtype) / num_rows


def balance_loss(
    routing: Routing, loads: Float[Array, " experts"] | None = None
) -> Float[Array, ""]:
    """What is to be added to the loss of training, so that no expert is left out.

    E sum_i f_i P_i over the E experts: f the load, P the mean probability. It is
    `top_k` where both are even, and up to E times as much; only P has a gradient.

    Args:
      routing: of the rows.
      loads: f of all rows, if others have some, too: the mean over all of what this
        returns is then the loss of all. None means that these are all.

    Source: Fedus et al. 2021, Switch Transformers, arXiv:2101.03961, equations 4-6; for
    several experts a row f sums to `top_k`, as in transformers' Mixtral.
    """
    loads = expert_load(routing) if loads is None else loads
    mean = jnp.mean(routing.probs, axis=0)
    return routing.probs.shape[1] * jnp.sum(loads * mean)


class Imbalance(NamedTuple):
    """How unevenly the experts of each layer are chosen."""

    busiest: Float[Array, " layers"]
    """Load of the most chosen expert over the mean: 1 if even, at most experts / top_k.
    With experts on devices of their own, so much longer do all wait."""
    variation: Float[Array, " layers"]
    """Standard deviation of the load over its mean: 0 if even."""
    idle: Float[Array, " layers"]
    """Share of experts that nobody chose."""


def imbalance(loads: Float[Array, "layers experts"]) -> Imbalance:
    """Sums up the loads of a model's mixtures, as `expert_load` gives them."""
    mean = jnp.mean(loads, axis=1)
    return Imbalance(
        busiest=jnp.max(loads, axis=1) / mean,
        variation=jnp.std(loads, axis=1) / mean,
        idle=jnp.mean((loads == 0).astype(loads.dtype), axis=1),
    )


def _permute(x: Float[Array, "pairs width"], order: Int32[Array, " pairs"]) -> Array:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
