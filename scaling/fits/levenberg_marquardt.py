"""Runs the optimiser on observations: in float64, in pieces, from many starts."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from scaling.fits import multistart, restrictions
from scaling.fits.multistart import Solution, Space
from scaling.fits.observations import Observations
from scaling.laws import Law, evaluation

Loss = Literal["huber", "lad", "mse"]
Report = Callable[[float], None]

DELTA = 1e-3
LAST_DELTA = 1e-8
"""Below it Huber's loss is, to rounding, the absolute value times delta."""
_PIECE, _LEAST_PIECE = 1024, 64
"""Problems in one call: one compiled program, and pauses in which to report."""
_MAX_WEIGHTS = 2**24
"""Weights in one call: with more points, a call has fewer problems."""
MANY_ROWS = 4096
"""With more rows problems are solved one after the other: the memory of a row is then
that of one problem. Starts are compared on so many rows, and intervals are not drawn
from resamples (`intervals.draw_normal`)."""
_POINTS = 16
"""Points are padded to a multiple of it, so that similar sizes share a program;
few ones to twice that."""


class FitProblem(NamedTuple):
    """What is minimised, over which runs.

    Attributes:
      law: what is fitted.
      seen: the runs.
      loss: of a residual: `huber`, quadratic up to `delta` and linear beyond; `lad`,
        its size; `mse`, half its square.
      delta: see there.
      space: whether residuals are of logarithms or of the target itself.
      limits: of coordinates that are given or bounded, as `restrictions` has them.
    """

    law: Law
    seen: Observations
    loss: Loss = "huber"
    delta: float = DELTA
    space: Space = "log"
    limits: restrictions.Bounds = MappingProxyType({})

    @property
    def box(self) -> tuple[np.ndarray, np.ndarray]:
        """Least and largest coordinates."""
        return restrictions.coordinate_box(self.law, self.seen.level, self.limits)

    @property
    def free(self) -> Bool[np.ndarray, " k"]:
        """Which coordinates are fitted: all that are not given."""
        ends = [self.limits.get(name, (0, 1)) for name in self.law.coefficients]
        return np.array([low < high for low, high in ends])

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the coefficients that are not fitted."""
        return tuple(name for name, (low, high) in self.limits.items() if low == high)

    def deltas(self) -> list[float]:
        """The deltas to go through: a small one is approached from larger ones."""
        if self.loss == "mse":
            return [np.inf]
        last = LAST_DELTA if self.loss == "lad" else self.delta
        steps = max(0, round(np.log10(DELTA / last)))
        return [*np.geomspace(DELTA, last, steps + 1)[:-1], last]

    def residuals(
        self, coordinates: Float[np.ndarray, " k"]
    ) -> Float[np.ndarray, " n"]:
        """Computes prediction minus what was seen, in the problem's space."""
        value = evaluation.values(self.law, coordinates[None], self.seen.logs)[0]
        if self.space == "log":
            return value - self.seen.target
        return np.exp(value) - np.exp(self.seen.target)


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
      problem: what is minimised.
      weights: of the runs, instead of those in `problem.seen`; or what makes the next
        so many problems' weights, where all together are too large.
      starts: coordinates.
      box: least and largest coordinates of each problem; by default those of `problem`.
      tolerance: see `multistart.SolverSettings`; a stage of a small delta scales it.
      report: called with the number of problems done.

    Returns:
      The ends, on the host, in float64.
    """
    size = _PIECE
    while size > _LEAST_PIECE and size * problem.seen.num_points > _MAX_WEIGHTS:
        size //= 2
    if problem.seen.num_points > MANY_ROWS:
        size = 1
    parts, done = [], 0
    while done < len(starts):
        some = starts[done : done + size]
        now = done + len(some)
        fixed = isinstance(weights, np.ndarray)
        given = weights[done:now] if fixed else weights(len(some))
        walls = problem.box if box is None else [x[done:now] for x in box]
        parts.append(_solve_piece(problem, given, some, walls, size, tolerance))
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
    """Solves at most `size` problems in a call of that many."""
    seen, count = problem.seen, len(starts)
    unit = _POINTS if seen.num_points > 8 * _POINTS else 2 * _POINTS
    room = -seen.num_points % unit
    logs = np.pad(seen.logs, ((0, 0), (0, room)))
    target = np.pad(seen.target, (0, room), constant_values=seen.level)
    if box[0].ndim > 1:
        box = [np.pad(x, ((0, size - count), (0, 0)), "edge") for x in box]
    with jax.enable_x64(True):
        lanes = min(size, _LEAST_PIECE)
        call = multistart.compiled_minimize(problem.law, problem.space, lanes)
        full = np.zeros((size, seen.num_points + room))
        full[:count, : seen.num_points] = weights
        x = np.zeros((size, starts.shape[1]))
        x[:count] = np.clip(starts, *(x[:count] if x.ndim > 1 else x for x in box))
        steps, found = np.zeros(count, np.int32), []
        arrays = [jnp.asarray(a) for a in (logs, target, full)]
        walls = tuple(jnp.asarray(x) for x in box)
        for delta in problem.deltas():
            scale = min(1.0, delta / DELTA) if np.isfinite(delta) else 1.0
            least = jnp.float64(tolerance * scale)
            settings = multistart.SolverSettings(
                jnp.float64(delta), jnp.int32(count), least
            )
            end = call(*arrays, jnp.asarray(x), walls, settings)
            x = np.asarray(end.coordinates)
            steps += np.asarray(end.num_steps)[:count]
            found = [np.asarray(part)[:count] for part in end]
    return Solution(*found)._replace(num_steps=steps)


def draw_weights(
    seen: Observations, num_resamples: int, rng: np.random.Generator
) -> Float[np.ndarray, "resamples n"]:
    """Draws runs with replacement, as many as there are; counts how often each came.

    Rows of one cluster are drawn together.

    Args:
      seen: the runs.
      num_resamples: how many times.
      rng: draws them.
    """
    num_runs = int(seen.cluster.max()) + 1
    share = np.full(num_runs, 1 / num_runs)
    counts = rng.multinomial(num_runs, share, num_resamples)
    return counts[:, seen.cluster] * seen.weights
