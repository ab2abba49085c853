"""Search for learning rates: the next trial, the best rate, and power laws."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from scaling.fits import student_t


def next_rate(trials: Sequence[tuple[float, float]]) -> float:
    """Returns the next rate to try: beyond the best at an edge, else next to it.

    Trials are rates and their losses, three or more; a diverged one is not finite. An
    edge is extended by the grid's own factor. Between rates, the trial is on the side
    of the better neighbour, at the geometric mean.
    """
    rates, losses = zip(*sorted(trials), strict=True)
    losses = [loss if np.isfinite(loss) else np.inf for loss in losses]
    best = int(np.argmin(losses))
    if best == 0:
        return rates[0] ** 2 / rates[1]
    if best == len(rates) - 1:
        return rates[-1] ** 2 / rates[-2]
    adjacent = best - 1 if losses[best - 1] < losses[best + 1] else best + 1
    return float(np.sqrt(rates[best] * rates[adjacent]))


def optimal_rates(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, float]]:
    """Returns the best learning rate of every cell in which it is no edge.

    Args:
      rows: rows of a sweep's `runs.jsonl`, of completed runs.

    Returns:
      Width, tokens and rate, by a parabola in the log rate through the best and its two
      neighbours, for the first seed.
    """
    first = min(row["seed"] for row in rows)
    cells = collections.defaultdict(list)
    for row in rows:
        if row["seed"] == first:
            cells[row["cell"]].append(row)
    optima = []
    for cell_rows in cells.values():
        cell_rows.sort(key=lambda row: row["learning_rate"])
        losses = [row["loss"] for row in cell_rows]
        at = int(np.argmin(losses))
        if not 0 < at < len(cell_rows) - 1:
            continue
        x = np.log([row["learning_rate"] for row in cell_rows[at - 1 : at + 2]])
        bend, slope, _ = np.polyfit(x - x[1], losses[at - 1 : at + 2], 2)
        rate = math.exp(x[1] - slope / (2 * bend)) if bend > 0 else math.exp(x[1])
        optima.append((cell_rows[0]["hidden_size"], cell_rows[0]["num_tokens"], rate))
    return optima


@validation.checks_numbers(num_tokens=(1, 2**63))
def extrapolate(
    rows: Sequence[Mapping[str, Any]], width: int, num_tokens: int
) -> tuple[float, tuple[float, float]]:
    """Predicts the best learning rate by a power law of width and tokens.

    Args:
      rows: as for `optimal_rates`.
      width: width of the model to train.
      num_tokens: number of training tokens.

    Returns:
      The rate, to four digits, and the two exponents. If fewer than three widths and
      two lengths have an optimum, the rate of the nearest cell by tokens, times the
      ratio of its width to `width`.
    """
    optima = optimal_rates(rows)
    if len({w for w, _, _ in optima}) >= 3 and len({d for _, d, _ in optima}) >= 2:
        _, powers = _least_squares(*np.array(optima, float).T)
        value = powers @ [1.0, math.log(width), math.log(num_tokens)]
        return float(f"{math.exp(value):.4g}"), (float(powers[1]), float(powers[2]))
    best = min(rows, key=lambda row: (abs(row["num_tokens"] - num_tokens), row["loss"]))
    scale = best["hidden_size"] / width
    return float(f"{best['learning_rate'] * scale:.4g}"), (-1.0, 0.0)


class RatePowers(NamedTuple):
    """`rate = coefficient width^of_width tokens^of_tokens`, with half intervals.

    NaN with too few optima.
    """

    coefficient: float
    of_width: float
    of_width_half: float
    of_tokens: float
    of_tokens_half: float


@validation.checks_numbers(level="(0, 1)")
def fit_powers(
    width: Float[np.ndarray, " optima"],
    num_tokens: Float[np.ndarray, " optima"],
    rate: Float[np.ndarray, " optima"],
    *,
    level: float,
) -> RatePowers:
    """Fits a power law to optima by least squares in logarithms.

    `level` is the probability of the Student's t intervals, in (0, 1).
    """
    design, powers = _least_squares(width, num_tokens, rate)
    freedom = len(rate) - 3
    if freedom < 1 or np.linalg.matrix_rank(design) < 3:
        return RatePowers(*[float("nan")] * 5)
    residuals = np.log(rate) - design @ powers
    covariance = np.linalg.inv(design.T @ design) * (residuals @ residuals) / freedom
    half = student_t(level, freedom) * np.sqrt(np.diagonal(covariance))
    return RatePowers(
        coefficient=float(np.exp(powers[0])),
        of_width=float(powers[1]),
        of_width_half=float(half[1]),
        of_tokens=float(powers[2]),
        of_tokens_half=float(half[2]),
    )


def _least_squares(
    width: np.ndarray, num_tokens: np.ndarray, rate: np.ndarray
) -> tuple[Float[np.ndarray, "optima 3"], Float[np.ndarray, " 3"]]:
    """Returns the design matrix of the log rates, and the coefficients.

    Source: the form is that of Li et al. 2025 (Step Law), arXiv:2503.04715, section 3.
    """
    design = np.stack([np.ones(len(rate)), np.log(width), np.log(num_tokens)], 1)
    return design, np.linalg.lstsq(design, np.log(rate), rcond=None)[0]
