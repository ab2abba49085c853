"""The best learning rate and batch size of a larger run, and the loss lost by a miss.

    ln loss = floor of (N, D) + (p w + s v)^2 + (q v)^2,   w = (exp(g u) - 1) / g
    u = ln(rate / best rate),     best rate  = c N^a D^b
    v = ln(batch / best batch),   best batch = c' N^a' D^b'

The powers are those of Li et al. 2025, arXiv:2503.04715 (Step Law), where the batch
does not depend on N. All cells of N and D share the valley around the optimum: `g` is
its skew, since a rate that is too large costs more, and `s` couples rate and batch.
Runs up to 4 % above the lowest loss of their cell are fitted by Huber's loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from scaling.fits import FitResult, Objective, student_t
from scaling.fits import fit as fit_law
from scaling.forecasts.least_squares import minimize_huber
from scaling.laws import LAWS
from scaling.logs import RunSize, TunedCell

WINDOW = 0.04
"""Largest ln(loss / lowest loss of the cell) of a fitted run."""
MIN_RUNS = 6
"""Fewest runs of a cell in the window."""
MIN_CELLS = 4
MIN_FLOORS = 6
"""Fewest cells from which the loss itself is predicted."""
_NUM_SHARED = 10
"""Coefficients that the cells share; the floor of each follows them."""
_LEAST_SKEW = 1e-6
_LARGEST_EXCESS = 700.0
"""ln(loss / lowest loss) whose exponential is finite."""


class PowerPair(NamedTuple):
    """`scale * N^n_exponent * D^d_exponent`.

    Attributes:
      scale: value at N = D = 1.
      n_exponent: exponent of the parameters.
      d_exponent: exponent of the tokens.
    """

    scale: float
    n_exponent: float
    d_exponent: float

    def value(self, size: RunSize) -> float:
        """Returns the value at a size."""
        powers = size.num_params**self.n_exponent * size.num_tokens**self.d_exponent
        return self.scale * powers


STEP_LAW_RATE = PowerPair(1.79, -0.713, 0.307)
"""Best learning rate of Li et al. 2025, arXiv:2503.04715, of parameters without
embeddings."""
STEP_LAW_BATCH = PowerPair(0.58, 0.0, 0.571)
"""Best batch in tokens, of the same source."""


class Valley(NamedTuple):
    """Relative loss around the optimum, the same at all sizes.

    Attributes:
      p: curvature along the rate.
      s: coupling of rate and batch.
      q: curvature along the batch.
      skew: g, positive if a rate that is too large costs more.
    """

    p: float
    s: float
    q: float
    skew: float

    def excess(
        self, u: Float[np.ndarray, " n"], v: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """Returns ln(loss / lowest loss) at offsets of ln(rate) and ln(batch)."""
        w = _skewed(u, self.skew)[0]
        return (self.p * w + self.s * v) ** 2 + (self.q * v) ** 2


class RateBatchFit(NamedTuple):
    """A fitted surface of the loss over rate, batch, parameters and tokens.

    Attributes:
      rate: best learning rate.
      batch: best batch size, in the unit of the file.
      valley: the loss around them.
      floors: lowest loss of each cell by the fit, by its size.
      refits: rate and batch of the fits without one cell each.
      scatter: root mean square of ln(best measured / best fitted) of rate and batch.
      median_residual: median |residual| of ln(loss).
      num_runs: number of fitted runs.
      warnings: problems, in sentences.
    """

    rate: PowerPair
    batch: PowerPair
    valley: Valley
    floors: dict[RunSize, float]
    refits: tuple[tuple[PowerPair, PowerPair], ...]
    scatter: tuple[float, float]
    median_residual: float
    num_runs: int
    warnings: list[str]


class RateBatchPrediction(NamedTuple):
    """The best pair at a size.

    Attributes:
      rate: best learning rate.
      rate_interval: its interval.
      batch: best batch size.
      batch_interval: its interval.
    """

    rate: float
    rate_interval: tuple[float, float]
    batch: float
    batch_interval: tuple[float, float]


def fit_rate_batch(cells: Sequence[TunedCell]) -> RateBatchFit:
    """Fits the surface to all cells, and again without each of them.

    Args:
      cells: runs by parameters and tokens.

    Raises:
      ValueError: fewer than 4 cells have 6 runs in the window, or these cells do not
        determine the exponents of N and D.
    """
    warnings = []
    usable = []
    for cell in cells:
        if _window(cell).sum() < MIN_RUNS:
            warnings.append(
                f"{cell.size.label}: fewer than {MIN_RUNS} runs are within "
                f"{WINDOW:.0%} of the lowest loss; the cell is not fitted"
            )
            continue
        usable.append(cell)
        pairs = cell.pairs
        for column, word in ((0, "learning rate"), (1, "batch size")):
            best = pairs[cell.best, column]
            if best in (pairs[:, column].min(), pairs[:, column].max()):
                warnings.append(
                    f"{cell.size.label}: the best {word} is at the edge of its grid"
                )
    design = _design([cell.size for cell in usable])
    if len(usable) < MIN_CELLS or np.linalg.matrix_rank(design, tol=1e-6) < 3:
        raise ValueError(
            f"{len(usable)} cells of N and D with {MIN_RUNS} runs near their lowest "
            f"loss: a fit needs {MIN_CELLS}, of several N and several D"
        )
    best, valley, floors, residuals = _fit_surface(usable, None)
    refits = []
    for i in range(len(usable)):
        others = usable[:i] + usable[i + 1 :]
        sizes = [cell.size for cell in others]
        if np.linalg.matrix_rank(_design(sizes), tol=1e-6) == 3:
            refits.append(_fit_surface(others, (best, valley))[0])
    if len(refits) < len(usable):
        warnings.append(
            f"{len(usable) - len(refits)} cells are needed for an exponent, so the "
            "intervals are those of the other cells, too narrow"
        )
    best_pairs = np.array([cell.pairs[cell.best] for cell in usable])
    law = np.log([[power.value(cell.size) for power in best] for cell in usable])
    scatter = np.sqrt(((best_pairs - law) ** 2).mean(0))
    return RateBatchFit(
        *best,
        valley,
        {cell.size: float(x) for cell, x in zip(usable, floors, strict=True)},
        tuple(refits),
        (float(scatter[0]), float(scatter[1])),
        float(np.median(np.abs(residuals))),
        residuals.size,
        warnings,
    )


@validation.checks_numbers(level="(0, 1)")
def predict_rate_batch(
    fit: RateBatchFit, size: RunSize, *, level: float = 0.9
) -> RateBatchPrediction:
    """Predicts the best pair at a size, with intervals of the best measured pair.

    The variance is that of the jackknife over cells and that of the best measured pairs
    of the fitted cells, which noise moves along the flat valley.

    Args:
      fit: the fit.
      size: parameters and tokens.
      level: probability of the intervals, in (0, 1).
    """
    count = len(fit.refits)
    factor = student_t(level, max(1, count - 3))
    intervals = []
    for which, power in enumerate((fit.rate, fit.batch)):
        value = power.value(size)
        logs = np.log([refit[which].value(size) for refit in fit.refits])
        spread = (count - 1) / count * ((logs - logs.mean()) ** 2).sum()
        with np.errstate(over="ignore"):  # few cells: the interval may be infinite
            half = float(np.exp(factor * np.sqrt(spread + fit.scatter[which] ** 2)))
        intervals.append((value / half, value * half))
    return RateBatchPrediction(
        fit.rate.value(size), intervals[0], fit.batch.value(size), intervals[1]
    )


def fit_lowest_losses(fit: RateBatchFit) -> FitResult | None:
    """Fits Chinchilla's law to the lowest losses of the cells; None below 6 cells."""
    if len(fit.floors) < MIN_FLOORS:
        return None
    n, d = np.array([*fit.floors]).T
    data = {"num_params": n, "num_tokens": d, "loss": np.array([*fit.floors.values()])}
    return fit_law(LAWS["chinchilla"], data, objective=Objective(loss="mse"))


@validation.checks_numbers(rate="(0, inf)", batch="(0, inf)")
def lost_by_miss(fit: RateBatchFit, size: RunSize, rate: float, batch: float) -> float:
    """Returns the predicted loss lost by a pair, relative to that of the best pair."""
    u = np.log([rate / fit.rate.value(size)])
    v = np.log([batch / fit.batch.value(size)])
    return float(np.expm1(min(fit.valley.excess(u, v)[0], _LARGEST_EXCESS)))


def _window(cell: TunedCell) -> np.ndarray:
    return np.log(cell.loss / cell.loss.min()) < WINDOW


def _design(sizes: Sequence[RunSize]) -> np.ndarray:
    """Returns 1, ln N and ln D of each size, centred."""
    logs = np.log(np.array(sizes, float).reshape(-1, 2))
    if len(logs):
        logs = logs - logs.mean(0)
    return np.column_stack([np.ones(len(logs)), logs])


def _skewed(u: np.ndarray, skew: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns w and its derivatives by u and by the skew."""
    if abs(skew) < _LEAST_SKEW:
        return u, np.ones_like(u), u**2 / 2
    slope = np.exp(np.clip(skew * u, -30, 30))
    w = (slope - 1) / skew
    return w, slope, (u * slope - w) / skew


def _fit_surface(
    cells: Sequence[TunedCell], start: tuple[tuple[PowerPair, PowerPair], Valley] | None
) -> tuple[tuple[PowerPair, PowerPair], Valley, np.ndarray, np.ndarray]:
    """Fits the surface to cells.

    Returns:
      Best rate and batch, the valley, the lowest loss of each cell, and the residuals.
    """
    design = _design([cell.size for cell in cells])
    windows = [_window(cell) for cell in cells]
    pairs = np.concatenate(
        [cell.pairs[x] for cell, x in zip(cells, windows, strict=True)]
    )
    losses = np.concatenate(
        [np.log(cell.loss[x]) for cell, x in zip(cells, windows, strict=True)]
    )
    cell_of_run = np.repeat(np.arange(len(cells)), [x.sum() for x in windows])
    rows = design[cell_of_run]
    centre = pairs.mean(0)
    lowest = np.log([cell.loss.min() for cell in cells])
    logs = np.log(np.array([cell.size for cell in cells]))

    def residuals(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, s, q, skew = c[6:_NUM_SHARED]
        u = pairs[:, 0] - centre[0] - rows @ c[:3]
        v = pairs[:, 1] - centre[1] - rows @ c[3:6]
        w, slope_u, slope_skew = _skewed(u, skew)
        first = p * w + s * v
        off = c[_NUM_SHARED:][cell_of_run] + first**2 + (q * v) ** 2 - losses
        slopes = np.zeros((off.size, c.size))
        slopes[:, :3] = -(2 * first * p * slope_u)[:, None] * rows
        slopes[:, 3:6] = -(2 * first * s + 2 * q**2 * v)[:, None] * rows
        slopes[:, 6] = 2 * first * w
        slopes[:, 7] = 2 * first * v
        slopes[:, 8] = 2 * q * v**2
        slopes[:, 9] = 2 * first * p * slope_skew
        slopes[np.arange(off.size), _NUM_SHARED + cell_of_run] = 1
        return off, slopes

    powers = (STEP_LAW_RATE, STEP_LAW_BATCH) if start is None else start[0]
    shape = (0.05, 0.0, 0.05, 0.1) if start is None else start[1]
    exponents = [x for power in powers for x in (0.0, *power[1:])]
    best = np.array([cell.pairs[cell.best] for cell in cells]).mean(0) - centre
    exponents[0], exponents[3] = map(float, best)
    first = np.array([*exponents, *shape, *lowest])
    low = np.full(first.size, -np.inf)
    high = np.full(first.size, np.inf)
    low[6:_NUM_SHARED] = (1e-4, -1.0, 1e-4, -2.0)
    high[6:_NUM_SHARED] = (1.0, 1.0, 1.0, 2.0)
    end = minimize_huber(residuals, first, delta=Objective().delta, low=low, high=high)
    c = end.coefficients
    middle = logs.mean(0)
    rate, batch = (
        PowerPair(float(np.exp(x[0] + at - x[1:] @ middle)), float(x[1]), float(x[2]))
        for x, at in ((c[:3], centre[0]), (c[3:6], centre[1]))
    )
    valley = Valley(*map(float, c[6:_NUM_SHARED]))
    return (rate, batch), valley, np.exp(c[_NUM_SHARED:]), residuals(c)[0]
