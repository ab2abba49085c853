"""Mixture of experts (MoE): routing, combination and load balance.

Rows are routed independently, without a capacity: every row reaches all of its experts.
Sorted by expert, rows form runs, which `pallas_kernels.grouped_matmul` multiplies by
the weights of their experts in one call.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


class Routing(NamedTuple):
    """Experts of the rows."""

    probs: Float[Array, "rows experts"]
    """Softmax over all experts, at least float32."""
    expert: Int32[Array, "rows top_k"]
    """Experts with the largest probabilities, best first; among equals the lower number
    is first."""
    share: Float[Array, "rows top_k"]
    """Factor of each expert's output."""


def route(
    scores: Float[Array, "rows experts"], *, top_k: int, renormalise: bool
) -> Routing:
    """Chooses the experts of every row.

    With p the softmax of the scores and T its `top_k` largest entries, expert i of T
    has the share p_i / sum_{j in T} p_j, which is the softmax over T; or p_i, if not
    renormalised. For scores 2, 1, 0 and two experts, shares are 0.7311 and 0.2689;
    without renormalisation 0.6652 and 0.2447.

    Args:
      scores: the router's logits.
      top_k: number of experts of a row, in [1, experts].
      renormalise: True if a row's shares sum to one.

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
    """Computes the outputs of every row's experts, and sums them by their shares.

    Args:
      x: the rows.
      routing: experts of the rows.
      answer: function of pairs of row and expert, sorted by expert, and the number of
        pairs of each expert; returns the experts' outputs. Pairs of rows that are not
        live are last and have no expert.
      live: True for rows to compute; None means all. The remaining rows have no
        experts, cost no product, and their results are undefined.

    Returns:
      The sums, in the dtype of `x`. They are computed in at least float32, in the order
      of the row's experts, so no row depends on another.
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
    # Repeated, then permuted, so that a gradient is summed in a fixed order on any
    # device.
    repeated = jnp.broadcast_to(x[:, None, :], (num_rows, top_k, x.shape[1]))
    found = answer(_permute(repeated.reshape(-1, x.shape[1]), order), sizes)
    found = _permute(found, place).reshape(num_rows, top_k, -1)
    share = routing.share[:, :, None]
    return jnp.sum(found.astype(share.dtype) * share, axis=1).astype(x.dtype)


def expert_load(routing: Routing) -> Float[Array, " experts"]:
    """Returns the fraction of the rows that chose each expert; sums to `top_k`."""
    num_rows, num_experts = routing.probs.shape
    every = jnp.arange(num_experts, dtype=routing.expert.dtype)
    chosen = routing.expert.reshape(-1)[:, None] == every[None, :]
    return jnp.sum(chosen, axis=0, dtype=routing.probs.dtype) / num_rows


def balance_loss(
    routing: Routing, loads: Float[Array, " experts"] | None = None
) -> Float[Array, ""]:
    """Returns the load-balancing loss of training.

    It is E sum_i f_i P_i over the E experts, with f the load and P the mean
    probability: `top_k` if both are even, and up to E times that. Only P has a
    gradient.

    Args:
      routing: the routing of the rows.
      loads: loads over all devices' rows; the mean of the result over devices is then
        the loss of all rows. None means the loads of `routing`.

    Source: Fedus et al. 2021, Switch Transformers, arXiv:2101.03961, equations 4-6; for
    several experts per row f sums to `top_k`, as in transformers' Mixtral.
    """
    loads = expert_load(routing) if loads is None else loads
    mean = jnp.mean(routing.probs, axis=0)
    return routing.probs.shape[1] * jnp.sum(loads * mean)


class Imbalance(NamedTuple):
    """Load imbalance of the experts of each layer."""

    busiest: Float[Array, " layers"]
    """Largest load over the mean: 1 if even, at most experts / top_k. With one expert
    per device, the step time grows by this factor."""
    variation: Float[Array, " layers"]
    """Standard deviation of the load over its mean: 0 if even."""
    idle: Float[Array, " layers"]
    """Fraction of experts that no row chose."""


def imbalance(loads: Float[Array, "layers experts"]) -> Imbalance:
    """Summarises the loads in a mixture of experts, as `expert_load` returns them."""
    mean = jnp.mean(loads, axis=1)
    return Imbalance(
        busiest=jnp.max(loads, axis=1) / mean,
        variation=jnp.std(loads, axis=1) / mean,
        idle=jnp.mean((loads == 0).astype(loads.dtype), axis=1),
    )


def _permute(x: Float[Array, "pairs width"], order: Int32[Array, " pairs"]) -> Array:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
