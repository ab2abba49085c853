"""Mixture of experts (MoE): routing, combination and load balance.

Rows are routed independently, without a capacity: every row reaches all of its experts.
Sorted by expert, rows form runs, which `pallas_kernels.grouped_matmul` multiplies by
the weights of their experts in one call.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxkv.models.config import Experts, ModelConfig

NO_EXPERT = -1
"""Entry of recorded routes where the router chooses."""


class Routing(NamedTuple):
    """Experts of the rows."""

    probs: Float[Array, "rows experts"]
    """Scores of all experts over their sum, at least float32: of the softmax, the
    scores themselves."""
    expert: Int32[Array, "rows top_k"]
    """Experts with the largest selection scores, best first; among equals the lower
    number is first."""
    share: Float[Array, "rows top_k"]
    """Factor of each expert's output."""
    bias: Float[Array, " experts"] | None = None
    """Selection bias, if any; see `load_as_gradient`."""


def route(
    logits: Float[Array, "rows experts"],
    experts: Experts,
    bias: Float[Array, " experts"] | None = None,
    replayed: Int32[Array, "rows top_k"] | None = None,
) -> Routing:
    """Chooses the experts of every row.

    With s the scores (softmax or sigmoid of the logits) and b the selection bias, an
    expert is chosen by s + b. With groups, only experts of the row's best `top_groups`
    groups are chosen; the score of a group is the largest s of its experts, or with a
    bias the sum of its two largest s + b. Among the chosen experts T, expert i has the
    share `scale` s_i / sum_{j in T} s_j, or `scale` s_i if not renormalised. For the
    softmax of the logits 2, 1, 0 and two experts, shares are 0.7311 and 0.2689; without
    renormalisation 0.6652 and 0.2447.

    Args:
      logits: the router's logits.
      experts: the rules of the mixture.
      bias: the selection bias, if the mixture has one.
      replayed: experts to use in place of the chosen ones, for example those of a
        sampler (router replay); entries of `NO_EXPERT` are chosen. Shares are computed
        from the scores of `logits`, as above. Shares of experts that do not exist are
        NaN.

    Source: Shazeer et al. 2017, arXiv:1701.06538, equations 3-5; Jiang et al. 2024,
    arXiv:2401.04088, section 2.1; groups: DeepSeek-V2, arXiv:2405.04434, section 2.2.2;
    bias: DeepSeek-V3, arXiv:2412.19437, equations 12-16, and DeepSeek's `Gate`; replay:
    Ma et al. 2025, rollout routing replay (R3), arXiv:2510.11370; Megatron-LM's
    `RouterReplay`.
    """
    num_groups = experts.num_groups
    top_groups = experts.top_groups
    if experts.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probs = scores / (jnp.sum(scores, axis=1, keepdims=True) + _MIN_WEIGHT_SUM)
    else:
        scores = probs = jax.nn.softmax(logits, axis=1)
    selection = scores
    if bias is not None:
        selection = scores + lax.stop_gradient(bias)[None, :]
    if top_groups < num_groups:
        grouped = selection.reshape(len(logits), num_groups, -1)
        best, _ = lax.top_k(grouped, 1 if bias is None else 2)
        _, group = lax.top_k(jnp.sum(best, axis=2), top_groups)
        every = jnp.arange(num_groups, dtype=group.dtype)
        is_allowed = jnp.any(group[:, :, None] == every[None, None, :], axis=1)
        lowest = jnp.asarray(-jnp.inf, selection.dtype)
        selection = jnp.where(is_allowed[:, :, None], grouped, lowest)
        selection = selection.reshape(scores.shape)
    share, expert = lax.top_k(selection, experts.top_k)
    if replayed is not None:
        expert = jnp.where(replayed == NO_EXPERT, expert, replayed)
        index = jnp.where(expert < 0, experts.num_experts, expert)
        share = jnp.take_along_axis(scores, index, 1, mode="fill", fill_value=jnp.nan)
    elif bias is not None:
        share = jnp.take_along_axis(scores, expert, axis=1)
    if experts.renormalise:
        total = jnp.sum(share, axis=1, keepdims=True)
        # All sigmoids of a row may be zero.
        share = share / (
            total + experts.sum_eps if experts.scoring == "sigmoid" else total
        )
    if experts.scale != 1:
        share = share * jnp.asarray(experts.scale, share.dtype)
    return Routing(probs, expert, share, bias)


def check_routes(
    config: ModelConfig,
    routes: Int[Array | np.ndarray, "sequences length mixtures top_k"],
    shape: tuple[int, ...],
) -> None:
    """Checks the recorded experts of each token; of traced arrays only the shape.

    Args:
      config: the model.
      routes: experts of each token in each mixture, or `NO_EXPERT`.
      shape: numbers of sequences and of tokens of each.

    Raises:
      ValueError: the model has no experts, the shape is another, an expert does not
        exist or is named twice for a token, or `NO_EXPERT` is mixed with experts.
    """
    experts = config.experts
    if experts is None:
        raise ValueError("routes must be None for a model without experts")
    wanted = (*shape, config.num_mixtures, experts.top_k)
    if routes.shape != wanted:
        raise ValueError(f"{routes.shape=} must be {wanted}")
    if isinstance(routes, jax.core.Tracer):
        return
    ids = np.sort(np.asarray(routes), axis=-1)
    low, high = ids.min(initial=NO_EXPERT), ids.max(initial=NO_EXPERT)
    if low < NO_EXPERT or high >= experts.num_experts:
        outside = low if low < NO_EXPERT else high
        raise ValueError(
            f"routes have expert {outside}, and must be in "
            f"[0, {experts.num_experts}), or {NO_EXPERT} where the router chooses"
        )
    is_free = ids == NO_EXPERT
    if np.any(is_free[..., 0] != is_free[..., -1]):
        raise ValueError(f"routes must be {NO_EXPERT} for all experts of a token")
    if np.any((ids[..., 1:] == ids[..., :-1]) & ~is_free[..., 1:]):
        raise ValueError("routes must name each expert of a token once")


_MIN_WEIGHT_SUM = 1e-20
"""Added to sums of sigmoids, as in DeepSeek-V3's implementation."""


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
    expert_rows = answer(_permute(repeated.reshape(-1, x.shape[1]), order), sizes)
    expert_rows = _permute(expert_rows, place).reshape(num_rows, top_k, -1)
    share = routing.share[:, :, None]
    return jnp.sum(expert_rows.astype(share.dtype) * share, axis=1).astype(x.dtype)


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

    It is E sum_i f_i P_i over the E experts, with f the load and P the mean of
    `probs`: `top_k` if both are even, and up to E times that. Only P has a
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


def load_as_gradient(
    routing: Routing, loads: Float[Array, " experts"]
) -> Float[Array, ""]:
    """Returns zero, with the loads as its gradient by the selection bias.

    The bias has no other gradient. A training loss that contains this term delivers the
    loads of a step, averaged over pieces and devices as every gradient is, to the
    update of the bias.
    """
    assert routing.bias is not None  # only of mixtures with a selection bias
    total = jnp.sum(routing.bias * lax.stop_gradient(loads))
    return total - lax.stop_gradient(total)


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
