"""The cheapest model to train and to serve: size and tokens for one budget of both.

Training costs `6 N D` operations at a price. Serving costs what a ladder of sizes
states: for each size the cost of the whole load, in the same unit, USD or J. It comes
from a fit of servers (`calibration.find_goodput`), from measurements, or from the
closed form of 2 N operations per token (`closed_form_ladder`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation
from scaling.laws import (
    AMOUNTS,
    AMOUNTS_FROM_0,
    Amount,
    Optimum,
    TwoPowers,
    divide_budget,
)
from scaling.plan.budgets import LOSSES, budget_loss, cheapest_model

_POINTS = 65
"""Sizes of a search between two rungs; odd, so that the middle is one of them."""
_ZOOMS = 6
_RUNG_ROUNDING = 1e-12
_EDGE_DISTANCE = 1e-6
"""Relative distance to an end of the ladder within which an optimum is at its edge."""


class ServingLadder(NamedTuple):
    """Cost of serving one load with models of several sizes.

    Attributes:
      num_params: sizes, ascending.
      cost: cost of the whole load, at least 0; infinite if no server takes it.
      replica: number of the kind of server. The cost of a size between two rungs is
        interpolated only if both have the same kind; else it is that of the larger.
    """

    num_params: Float[np.ndarray, " sizes"]
    cost: Float[np.ndarray, " sizes"]
    replica: Int[np.ndarray, " sizes"]


class CostOptimum(NamedTuple):
    """The best model for training and serving together.

    Attributes:
      num_params: parameters N.
      num_tokens: training tokens D.
      loss: its loss.
      training_cost: cost of 6 N D operations.
      serving_cost: cost of the load.
      is_edge: True if N is at an end of the ladder and not the compute optimum, so that
        a longer ladder may have a better one.
    """

    num_params: float
    num_tokens: float
    loss: float
    training_cost: float
    serving_cost: float
    is_edge: bool

    @property
    def cost(self) -> float:
        """Cost of training and serving."""
        return self.training_cost + self.serving_cost


@validation.checks_numbers(inference_tokens=AMOUNTS_FROM_0, flop_cost=AMOUNTS)
def closed_form_ladder(
    num_params: Float[np.ndarray, " sizes"],
    inference_tokens: float,
    flop_cost: float,
) -> ServingLadder:
    """Returns the cost of 2 N operations for each token that is read or written.

    Args:
      num_params: sizes, ascending.
      inference_tokens: tokens of all prompts and answers.
      flop_cost: price of an operation in serving: USD per hour / (peak rate x MFU of
        serving x 3600).

    Source: Sardana et al. 2024, arXiv:2401.00448, section 2.
    """
    sizes = np.asarray(num_params, float)
    cost = 2 * sizes * inference_tokens * flop_cost
    return ServingLadder(sizes, cost, np.zeros(sizes.size, int))


@validation.checks_numbers(flop_cost=AMOUNTS, budget=AMOUNTS, target_loss=LOSSES)
def total_cost(
    powers: TwoPowers,
    ladder: ServingLadder,
    *,
    flop_cost: float,
    budget: float | None = None,
    target_loss: float | None = None,
) -> CostOptimum:
    """Finds the model of least loss for a budget, or of least cost for a loss.

    `min L(N, D)` subject to `p 6 N D + S(N) = budget`, or `min p 6 N D + S(N)` subject
    to `L(N, D) = target_loss`, with the price p of an operation and the cost S of the
    ladder. Candidates are the sizes of the ladder and those between. Between neighbours
    with one kind of server log S is interpolated in log N; between two kinds a size
    costs as much as the larger neighbour, whose servers can serve it. A size of the
    ladder is left out if a larger one is cheaper to serve: below the compute optimum it
    is more expensive to train as well. So S rises with N. Sizes above the compute
    optimum are no candidates: without a load it is the result, and no load makes a
    larger model best.

    For S = s x load or s x price with fixed s, N never rises with load or price, since
    S then rises faster in larger sizes. It can rise with the rate of requests if whole
    servers are paid: a larger one may use the same number of servers better.

    Args:
      powers: terms of the loss, of unique tokens.
      ladder: cost of serving, in the unit of the other costs.
      flop_cost: price of an operation in training.
      budget: cost of training and serving together.
      target_loss: loss to reach; exactly one of both is a number.

    Raises:
      ValueError: not exactly one aim, a loss that is not above the floor, or no size of
        the ladder can be trained and served.

    Source: Sardana et al. 2024, arXiv:2401.00448, equation 3, with any cost of serving.
    """
    if (budget is None) == (target_loss is None):
        raise ValueError(
            f"exactly one of {budget=} and {target_loss=} must be a number"
        )
    _check_ladder(ladder)
    top = math.log(_compute_optimum(powers, flop_cost, budget, target_loss).num_params)

    def objective(logs: np.ndarray, serving: np.ndarray) -> np.ndarray:
        """Returns the loss for a budget, or else the cost; infinity if impossible."""
        sizes = np.exp(logs)
        tokens = num_tokens(sizes, serving)
        if budget is None:
            return 6 * flop_cost * sizes * tokens + serving
        enough = tokens > 0
        losses = np.full(logs.shape, np.inf)
        if enough.any():
            losses[enough] = budget_loss(powers, sizes[enough], tokens[enough])
        return losses

    def num_tokens(sizes: Amount, serving: Amount) -> Any:
        if budget is not None:
            return (budget - serving) / (6 * flop_cost * sizes)
        assert target_loss is not None
        return tokens_for_loss(powers, np.asarray(sizes), target_loss)

    ends, costs = _find_segments(ladder, top)
    low, high = ends[:, :1], ends[:, 1:]
    grid = serving = values = np.full((1, 1), np.inf)
    for _ in range(_ZOOMS if len(ends) else 0):
        grid = low + (high - low) * np.linspace(0.0, 1.0, _POINTS)
        serving = _interpolate(grid, ends, costs)
        values = objective(grid, serving)
        places = np.argmin(values, axis=1)[:, None]
        low = np.take_along_axis(grid, np.maximum(places - 2, 0), 1)
        high = np.take_along_axis(grid, np.minimum(places + 2, _POINTS - 1), 1)
    best = np.unravel_index(np.argmin(values), values.shape)
    if not np.isfinite(values[best]):
        aim = f"{target_loss=:g}" if budget is None else f"{budget=:.4g}"
        raise ValueError(
            f"{aim} must leave a size of the ladder that can be trained and served: "
            f"sizes from {ladder.num_params[0]:.3g} to {ladder.num_params[-1]:.3g}, "
            f"serving from {ladder.cost.min():.4g} to {ladder.cost.max():.4g}"
        )
    log_params = float(grid[best])
    num_params = math.exp(log_params)
    serving_cost = float(serving[best])
    tokens = float(num_tokens(num_params, serving_cost))
    end_distance = np.abs(np.log(ladder.num_params[[0, -1]]) - log_params).min()
    return CostOptimum(
        num_params=num_params,
        num_tokens=tokens,
        loss=float(budget_loss(powers, num_params, tokens)),
        training_cost=6 * flop_cost * num_params * tokens,
        serving_cost=serving_cost,
        is_edge=bool(end_distance < _EDGE_DISTANCE < abs(log_params - top)),
    )


@validation.checks_numbers(num_params=AMOUNTS)
def ladder_cost(ladder: ServingLadder, num_params: Amount) -> Any:
    """Returns the cost of serving any size, as `total_cost` has it.

    Sizes below the ladder cost as much as the smallest, and those above it as much per
    parameter as the largest.

    Args:
      ladder: cost of serving; a server takes at least one size.
      num_params: sizes.
    """
    usable = np.flatnonzero(np.isfinite(ladder.cost))
    costs = ladder.cost[usable]
    rungs = usable[costs <= np.minimum.accumulate(costs[::-1])[::-1]]
    rung_sizes = ladder.num_params[rungs]
    sizes = np.asarray(num_params, float)
    inside = np.clip(sizes, rung_sizes[0], rung_sizes[-1]).reshape(-1)
    first = np.searchsorted(rung_sizes, inside, side="right") - 1
    second = np.minimum(first + 1, len(rungs) - 1)
    pairs = rungs[np.stack([first, second], axis=1)]
    ends = np.log(ladder.num_params[pairs])
    values = _interpolate(np.log(inside)[:, None], ends, ladder.cost[pairs])[:, 0]
    kinds = ladder.replica[pairs]
    is_above = inside > rung_sizes[first] * (1 + _RUNG_ROUNDING)
    is_between = (kinds[:, 0] != kinds[:, 1]) & is_above
    values = np.where(is_between, ladder.cost[rungs[second]], values)
    return values.reshape(sizes.shape) * np.maximum(sizes / rung_sizes[-1], 1.0)


@validation.checks_numbers(target_loss=LOSSES)
def tokens_for_loss(
    powers: TwoPowers, num_params: Float[np.ndarray, "..."], target_loss: float
) -> Float[np.ndarray, "..."]:
    """Returns the training tokens with which sizes reach a loss; infinity if none do.

    `D = (B / ((L - floor)^(1 / outer) - A / N^alpha))^(1 / beta)`.

    Args:
      powers: terms of the loss, of unique tokens.
      num_params: sizes.
      target_loss: the loss.
    """
    if not target_loss > powers.floor:
        raise ValueError(
            f"{target_loss=:g} must be above the floor, {powers.floor:.6g}"
        )
    room = (target_loss - powers.floor) ** (1 / powers.outer)
    left = room - powers.A * num_params**-powers.alpha
    with np.errstate(all="ignore"):
        tokens = (powers.B / np.maximum(left, 0.0)) ** (1 / powers.beta)
    return np.where(left > 0, tokens, np.inf)


class CostSpread(NamedTuple):
    """Intervals of the best model over draws of the law and of the servers.

    Attributes:
      num_params: interval of N.
      num_tokens: interval of D.
      loss: interval of the loss.
      cost: interval of the cost of training and serving.
      serving_cost: interval of the cost of serving.
      num_draws: number of draws.
      num_without: draws without an optimum, which are not used.
    """

    num_params: tuple[float, float]
    num_tokens: tuple[float, float]
    loss: tuple[float, float]
    cost: tuple[float, float]
    serving_cost: tuple[float, float]
    num_draws: int
    num_without: int


@validation.checks_numbers(
    flop_cost=AMOUNTS, budget=AMOUNTS, target_loss=LOSSES, level="(0, 1)"
)
def total_cost_spread(
    powers: Sequence[TwoPowers],
    ladders: Sequence[ServingLadder],
    *,
    flop_cost: float,
    budget: float | None = None,
    target_loss: float | None = None,
    level: float = 0.9,
) -> CostSpread | None:
    """Solves each pair of a draw of the law and a draw of the servers.

    Args:
      powers: laws, such as those of the resamples of a fit; one law for all draws is
        a sequence of one.
      ladders: costs of serving for draws of the servers, likewise.
      flop_cost: as for `total_cost`.
      budget: as for `total_cost`.
      target_loss: as for `total_cost`.
      level: probability of the intervals.

    Returns:
      Percentile intervals; None if fewer than two draws have an optimum.
    """
    num = max(len(powers), len(ladders))
    optima = []
    for i in range(num):
        try:
            best = total_cost(
                powers[i % len(powers)],
                ladders[i % len(ladders)],
                flop_cost=flop_cost,
                budget=budget,
                target_loss=target_loss,
            )
        except (ValueError, OverflowError):  # a draw without an optimum
            continue
        optima.append(best)
    if len(optima) < 2:
        return None
    columns = np.array([[*x[:3], x.cost, x.serving_cost] for x in optima])
    ends = np.quantile(columns, [(1 - level) / 2, (1 + level) / 2], axis=0)
    intervals = [(float(low), float(high)) for low, high in ends.T]
    return CostSpread(*intervals, num_draws=num, num_without=num - len(optima))


def _check_ladder(ladder: ServingLadder) -> None:
    sizes, costs, kinds = ladder
    if not len(sizes) == len(costs) == len(kinds) or not len(sizes):
        raise ValueError(
            f"ladder must have one cost and replica for each size: {len(sizes)} sizes, "
            f"{len(costs)} costs, {len(kinds)} replicas"
        )
    if not (np.all(sizes > 0) and np.all(np.diff(sizes) > 0)):
        raise ValueError("ladder.num_params must be above 0 and ascending")
    if not np.all(costs >= 0):
        raise ValueError("ladder.cost must be at least 0")


def _compute_optimum(
    powers: TwoPowers, flop_cost: float, budget: float | None, target: float | None
) -> Optimum:
    if budget is not None:
        return divide_budget(powers, budget / flop_cost)
    assert target is not None
    return cheapest_model(powers, target)


def _find_segments(
    ladder: ServingLadder, top: float
) -> tuple[Float[np.ndarray, "segments 2"], Float[np.ndarray, "segments 2"]]:
    """Returns the ranges of log sizes that are candidates, and the costs at their ends.

    Between two kinds of servers all sizes cost as much as the larger one.
    """
    logs = np.log(ladder.num_params)
    below = np.flatnonzero((logs <= top) & np.isfinite(ladder.cost))
    if not below.size:
        return np.empty((0, 2)), np.empty((0, 2))
    costs = ladder.cost[below]
    # No larger size of the candidates undercuts these.
    rungs = below[costs <= np.minimum.accumulate(costs[::-1])[::-1]]
    beyond = int(below[-1]) + 1
    if beyond < len(logs) and ladder.cost[rungs[-1]] <= ladder.cost[beyond] < np.inf:
        rungs = np.append(rungs, beyond)
    ends = []
    values = []
    for first, second in zip(rungs, [*rungs[1:], rungs[-1]], strict=True):
        if logs[first] > top:
            break
        if ladder.replica[first] != ladder.replica[second]:
            ends.append(logs[[first, first]])
            values.append(ladder.cost[[first, first]])
            values.append(ladder.cost[[second, second]])
        else:
            values.append(ladder.cost[[first, second]])
        ends.append(logs[[first, second]])
    ends = np.array(ends)
    values = np.array(values)
    cut = np.minimum(ends, top)
    return cut, _interpolate(cut, ends, values)


def _interpolate(
    logs: Float[np.ndarray, "segments n"],
    ends: Float[np.ndarray, "segments 2"],
    costs: Float[np.ndarray, "segments 2"],
) -> Float[np.ndarray, "segments n"]:
    """Interpolates log cost in log size; a line in cost if it is 0 at the start."""
    width = ends[:, 1:] - ends[:, :1]
    share = (logs - ends[:, :1]) / np.where(width > 0, width, 1.0)
    first, second = costs[:, :1], costs[:, 1:]
    has_powers = (first > 0) & np.isfinite(second)
    ratio = np.where(has_powers, second / np.where(has_powers, first, 1.0), 1.0)
    return np.where(has_powers, first * ratio**share, first + share * (second - first))
