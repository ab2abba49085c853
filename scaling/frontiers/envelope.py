"""Approach 1 of Chinchilla: the lower envelope of training curves.

At each of many budgets the best run is the one with the lowest curve; its size and its
tokens so far are N* and D*. Unless a run ends at the budget, its learning rate has not
decayed, and its loss is higher than that of a run that ends there: exponents are
comparable with those of approach 2 only with decayed runs at every point.

Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.1 and figure 2.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from scaling.frontiers.frontier import EDGE, FINE, TOO_FEW_SIZES, Find, Minima
from scaling.frontiers.groups import MIN_SIZES, merge_sizes

NUM_BUDGETS = 500
"""Number of budgets, evenly spaced in the logarithm; the published envelope has 1500,
which changes the exponent by less than its third digit."""


class TrainingCurves(NamedTuple):
    """Training curves, interpolated at common budgets.

    Attributes:
      flops: the budgets.
      num_params: size of each run.
      log_tokens: log tokens of a run at each budget; NaN outside its curve.
      log_loss: log loss of a run at each budget.
    """

    flops: Float[np.ndarray, " budgets"]
    num_params: Float[np.ndarray, " runs"]
    log_tokens: Float[np.ndarray, "runs budgets"]
    log_loss: Float[np.ndarray, "runs budgets"]


def interpolate_curves(
    run: Int[np.ndarray, " points"],
    num_params: Float[np.ndarray, " points"],
    num_tokens: Float[np.ndarray, " points"],
    flops: Float[np.ndarray, " points"],
    loss: Float[np.ndarray, " points"],
    *,
    num_budgets: int = NUM_BUDGETS,
    smoothing: float = 0.0,
) -> TrainingCurves:
    """Interpolates training curves at common budgets, linearly in log-log.

    Args:
      run: index of the run of each point.
      num_params: size of the run, the same for all of its points.
      num_tokens: tokens so far.
      flops: FLOPs so far.
      loss: nats per token.
      num_budgets: number of budgets over the range of all curves, at least 2.
      smoothing: decades of FLOPs over which a curve is averaged first, with a normal
        weight of that standard deviation; needed for curves of raw training losses,
        whose envelope would follow the noise.

    Returns:
      The curves, in the order of the runs' indices.

    Raises:
      ValueError: fewer than three sizes have a run with two points at different FLOPs.
    """
    log_c = np.log(flops)
    grid = np.linspace(log_c.min(), log_c.max(), num_budgets)
    sizes = []
    tokens = []
    losses = []
    order = np.lexsort((log_c, run))
    for places in np.split(order, np.flatnonzero(np.diff(run[order])) + 1):
        x = log_c[places]
        if x[0] == x[-1]:
            continue
        inside = (grid >= x[0]) & (grid <= x[-1])
        y = _smooth(x, np.log(loss[places]), smoothing * np.log(10))
        sizes.append(num_params[places[0]])
        for out, values in ((tokens, np.log(num_tokens[places])), (losses, y)):
            out.append(np.where(inside, np.interp(grid, x, values), np.nan))
    if not sizes:
        raise ValueError("no run has a curve: two points at different FLOPs")
    if (num_sizes := len({*sizes})) < MIN_SIZES:
        raise ValueError(
            f"curves of {num_sizes} {'sizes' if num_sizes > 1 else 'size'}: below "
            f"{MIN_SIZES}, the best one has no neighbour on either side"
        )
    return TrainingCurves(
        np.exp(grid), np.array(sizes), np.stack(tokens), np.stack(losses)
    )


def find_envelope(curves: TrainingCurves) -> Find:
    """Returns a finder of the best run at each budget.

    Returns:
      The finder. It rejects a budget at which the best run is the smallest or the
      largest with a curve (`groups.merge_sizes`), since a run beyond it might be
      better.
    """
    size_id = merge_sizes(curves.num_params)[1]
    loss = np.where(np.isnan(curves.log_loss), np.inf, curves.log_loss)
    order = np.argsort(loss, axis=0, kind="stable")  # best first, at each budget
    ranked_size = size_id[order]
    ranked_there = np.isfinite(np.take_along_axis(loss, order, 0))
    budgets = np.arange(loss.shape[1])

    def find(weights: np.ndarray) -> Minima:
        minima = Minima.nowhere(len(weights), loss.shape[1], TOO_FEW_SIZES)
        for i, weight in enumerate(weights):
            usable = ranked_there & (weight[order] > 0)
            first = np.argmax(usable, 0)
            best = order[first, budgets]
            its_size = ranked_size[first, budgets]
            smaller = (usable & (ranked_size < its_size)).any(0)
            larger = (usable & (ranked_size > its_size)).any(0)
            good = smaller & larger
            none = np.where(usable.any(0), EDGE, TOO_FEW_SIZES)
            minima.reason[i] = np.where(good, FINE, none)
            at = best[good], budgets[good]
            minima.num_params[i, good] = curves.num_params[best[good]]
            minima.num_tokens[i, good] = np.exp(curves.log_tokens[at])
            minima.loss[i, good] = np.exp(curves.log_loss[at])
        return minima

    return find


def _smooth(
    x: Float[np.ndarray, " points"], y: Float[np.ndarray, " points"], width: float
) -> Float[np.ndarray, " points"]:
    """Fits a line around every point, so that a sloping curve keeps its slope."""
    if not width > 0:
        return y
    u = x[None, :] - x[:, None]
    weight = np.exp(-0.5 * (u / width) ** 2)
    total = weight.sum(1)
    centre = (weight * u).sum(1) / total
    level = (weight @ y) / total
    square = (weight * (u - centre[:, None]) ** 2).sum(1)
    slope = (weight * (u - centre[:, None]) * y[None, :]).sum(1)
    slope = np.where(square > 0, slope / np.where(square > 0, square, 1.0), 0.0)
    return level - slope * centre
