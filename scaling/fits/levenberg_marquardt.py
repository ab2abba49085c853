"""Fits of observations with the optimizer: in float64, in batches, from many starts."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxkv import validation
from scaling import laws
from scaling.fits import multistart, restrictions
from scaling.fits.multistart import Solution, Space
from scaling.fits.observations import Observations
from scaling.laws import Law

Loss = Literal["huber", "lad", "mse"]
Report = Callable[[float], None]

DELTA = 1e-3
LAST_DELTA = 1e-8
"""Delta at which Huber's loss equals the absolute value times delta, up to rounding."""
_LEAST_DELTA = 1e-12
_ROWS_PER_PIECE = 1024
_LEAST_PIECE = 64
"""Problems of one call: one compiled program, with progress reports in between."""
_MAX_WEIGHTS = 2**24
"""Weights of one call: with more points, a call has fewer problems."""
MAX_EXACT_ROWS = 4096
"""Number of rows above which problems are solved one after another, to limit memory.
Starts are then compared on so many rows, and intervals are not resampled
(`intervals.draw_normal`)."""
_POINTS_PER_UNIT = 16
"""Points are padded to a multiple of it, so that similar sizes share a program; small
numbers of points to twice that."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """Sum of a loss over the residuals.

    Attributes:
      loss: loss of a residual: `huber`, half its square up to `delta` and linear
        beyond; `lad`, its absolute value; `mse`, half its square.
      delta: threshold of `huber`, at least 1e-12.
      space: `log` for residuals of logarithms, `linear` for those of the target itself.
    """

    loss: Loss = "huber"
    delta: float = DELTA
    space: Space = "log"

    def __post_init__(self) -> None:
        """Validates the fields."""
        validation.choice("loss", self.loss, get_args(Loss))
        validation.choice("space", self.space, get_args(Space))
        largest = sys.float_info.max
        delta = validation.number(
            "delta", self.delta, low=-largest, high=largest, hint="in (-inf, inf)"
        )
        if delta < _LEAST_DELTA:
            raise ValueError(
                f"{delta=} must be positive, at least {_LEAST_DELTA}; see loss='lad'"
            )
        object.__setattr__(self, "delta", delta)

    def sum_losses(
        self, residuals: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"]
    ) -> float:
        """Returns the weighted sum of the losses of residuals."""
        if self.loss == "lad":
            return float(weights @ np.abs(residuals))
        delta = math.inf if self.loss == "mse" else self.delta
        clipped = np.clip(residuals, -delta, delta)
        return float(weights @ (clipped * (residuals - clipped / 2)))

    def deltas(self) -> list[float]:
        """Returns a falling sequence of deltas, which ends at that of the loss."""
        if self.loss == "mse":
            return [math.inf]
        last = LAST_DELTA if self.loss == "lad" else self.delta
        steps = max(0, round(np.log10(DELTA / last)))
        return [*np.geomspace(DELTA, last, steps + 1)[:-1], last]


HUBER = Objective()
"""Huber's loss of log residuals, as in Hoffmann et al. 2022, arXiv:2203.15556."""


class FitProblem(NamedTuple):
    """A fit problem: law, runs and objective.

    Attributes:
      law: law to fit.
      runs: the runs.
      objective: loss and space of the residuals.
      limits: limits of fixed or bounded coordinates, see `restrictions`.
    """

    law: Law
    runs: Observations
    objective: Objective = HUBER
    limits: restrictions.Bounds = MappingProxyType({})

    @property
    def box(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest coordinates."""
        return restrictions.coordinate_box(self.law, self.runs.level, self.limits)

    @property
    def free(self) -> Bool[np.ndarray, " k"]:
        """Mask of the fitted coordinates."""
        ends = [self.limits.get(name, (0, 1)) for name in self.law.coefficients]
        return np.array([low < high for low, high in ends])

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """Names of the fixed coefficients."""
        return tuple(name for name, (low, high) in self.limits.items() if low == high)

    def residuals(
        self, coordinates: Float[np.ndarray, " k"]
    ) -> Float[np.ndarray, " n"]:
        """Returns prediction minus observation, in the problem's space."""
        value = laws.values(self.law, coordinates[None], self.runs.logs)[0]
        if self.objective.space == "log":
            return value - self.runs.target
        return np.exp(value) - np.exp(self.runs.target)


@validation.checks_numbers(tolerance=0)
def solve_weightings(
    problem: FitProblem,
    weights: Float[np.ndarray, "problems n"] | Callable[[int], np.ndarray],
    starts: Float[np.ndarray, "problems k"],
    *,
    box: tuple[np.ndarray, np.ndarray] | None = None,
    tolerance: float = 1e-10,
    report: Report = lambda done: None,
) -> Solution:
    """Fits many weightings of the same runs, each from its own start.

    Args:
      problem: the fit problem.
      weights: weights of the runs, instead of those in `problem.runs`; or a function
        that returns the weights of the next problems, if all are too large.
      starts: coordinates.
      box: smallest and largest coordinates of each problem; by default those of
        `problem`.
      tolerance: see `multistart.SolverSettings`; scaled down with a small delta.
      report: called with the number of completed problems.

    Returns:
      The solutions, on the host, in float64.
    """
    size = _ROWS_PER_PIECE
    while size > _LEAST_PIECE and size * problem.runs.num_points > _MAX_WEIGHTS:
        size //= 2
    if problem.runs.num_points > MAX_EXACT_ROWS:
        size = 1
    parts = []
    done = 0
    while done < len(starts):
        piece_starts = starts[done : done + size]
        now = done + len(piece_starts)
        fixed = isinstance(weights, np.ndarray)
        piece_weights = weights[done:now] if fixed else weights(len(piece_starts))
        walls = problem.box if box is None else [x[done:now] for x in box]
        parts.append(
            _solve_piece(problem, piece_weights, piece_starts, walls, size, tolerance)
        )
        report(done := now)
    return Solution(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def _solve_piece(
    problem: FitProblem,
    weights: np.ndarray,
    starts: np.ndarray,
    box: Sequence[np.ndarray],
    size: int,
    tolerance: float,
) -> Solution:
    """Solves at most `size` problems, padded to `size`."""
    runs = problem.runs
    count = len(starts)
    unit = (
        _POINTS_PER_UNIT
        if runs.num_points > 8 * _POINTS_PER_UNIT
        else 2 * _POINTS_PER_UNIT
    )
    room = -runs.num_points % unit
    logs = np.pad(runs.logs, ((0, 0), (0, room)))
    target = np.pad(runs.target, (0, room), constant_values=runs.level)
    if box[0].ndim > 1:
        box = [np.pad(x, ((0, size - count), (0, 0)), "edge") for x in box]
    with jax.enable_x64(True):
        lanes = min(size, _LEAST_PIECE)
        space = problem.objective.space
        call = multistart.compiled_minimize(problem.law, space, lanes)
        full = np.zeros((size, runs.num_points + room))
        full[:count, : runs.num_points] = weights
        x = np.zeros((size, starts.shape[1]))
        x[:count] = np.clip(starts, *(x[:count] if x.ndim > 1 else x for x in box))
        steps = np.zeros(count, np.int32)
        fields = []
        arrays = [jnp.asarray(a) for a in (logs, target, full)]
        walls = tuple(jnp.asarray(x) for x in box)
        for delta in problem.objective.deltas():
            scale = min(1.0, delta / DELTA) if np.isfinite(delta) else 1.0
            scaled_tolerance = jnp.float64(tolerance * scale)
            settings = multistart.SolverSettings(
                jnp.float64(delta), jnp.int32(count), scaled_tolerance
            )
            end = call(*arrays, jnp.asarray(x), walls, settings)
            x = np.asarray(end.coordinates)
            steps += np.asarray(end.num_steps)[:count]
            fields = [np.asarray(part)[:count] for part in end]
    return Solution(*fields)._replace(num_steps=steps)


def draw_weights(
    runs: Observations, num_resamples: int, rng: np.random.Generator
) -> Float[np.ndarray, "resamples n"]:
    """Draws runs with replacement; returns weights times the counts of the draws.

    Rows of one cluster are drawn together.

    Args:
      runs: the runs.
      num_resamples: number of resamples.
      rng: random generator.
    """
    num_runs = int(runs.cluster.max()) + 1
    share = np.full(num_runs, 1 / num_runs)
    counts = rng.multinomial(num_runs, share, num_resamples)
    return counts[:, runs.cluster] * runs.weights
