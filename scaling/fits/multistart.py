"""Robust nonlinear least squares, thousands of problems at a time, in float64.

Levenberg-Marquardt on Huber's objective. The curvature of a residual beyond delta is
zero in Newton's method, whose steps are then too long, and delta / |r| in reweighted
least squares, whose steps are then too short. Here it is `caution * delta / |r|`:
caution starts at 1, falls while steps succeed and rises when one fails, so the last
steps are Newton's. Bootstrap resamples of the surface in
`tests/scaling/fits/test_fitting.py` take 6 steps, and 17 with reweighting.

Problems differ in weights and starts only. A fixed number of lanes solves them; a lane
whose problem is done takes the next, so that no lane waits for the slowest problem.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PyTree

from jaxkv import validation
from scaling.laws import Law

Space = Literal["log", "linear"]

_FIRST_DAMPING = 1e-3
_LAST_DAMPING = 1e12
_LEAST_CAUTION = 1e-6


class SolverSettings(NamedTuple):
    """Threshold of outliers and stopping criteria; numbers or arrays.

    Attributes:
      delta: residual beyond which the loss is linear; infinite for least squares.
      tolerance: expected decrease of the objective at which a problem stops.
      max_steps: largest number of evaluations of a problem.
      num_problems: number of problems to solve, the first ones.
    """

    delta: float | Float[Array, ""]
    num_problems: int | Int32[Array, ""]
    tolerance: float | Float[Array, ""] = 1e-10
    max_steps: int | Int32[Array, ""] = 300


class Solution(NamedTuple):
    """Solutions of the problems, on the device or the host.

    Attributes:
      coordinates: best coordinates.
      objective: sum of weighted losses.
      promise: expected decrease of the objective by the next step.
      damping: damping of the next step; large if no step succeeded.
      num_steps: number of evaluations.
    """

    coordinates: Float[Any, "problems k"]
    objective: Float[Any, " problems"]
    promise: Float[Any, " problems"]
    damping: Float[Any, " problems"]
    num_steps: Int32[Any, " problems"]


class _Lane(NamedTuple):
    """State of one problem: coordinates, objective, gradient, and curvature."""

    problem: Int32[Array, "*lanes"]
    x: Float[Array, "*lanes k"]
    objective: Float[Array, "*lanes"]
    gradient: Float[Array, "*lanes k"]
    hessian: Float[Array, "*lanes k k"]
    damping: Float[Array, "*lanes"]
    caution: Float[Array, "*lanes"]
    num_steps: Int32[Array, "*lanes"]


def law_residuals(
    law: Law,
    coordinates: Float[Array, " k"],
    logs: Float[Array, "inputs n"],
    target: Float[Array, " n"],
    space: Space,
) -> tuple[Float[Array, " n"], Float[Array, "k n"]]:
    """Returns prediction minus target, and its derivatives.

    Args:
      law: the law.
      coordinates: coordinates of the law.
      logs: log inputs.
      target: log targets.
      space: `log` for differences of logarithms, `linear` for those of the numbers.
    """
    value, rows = law.derivatives(coordinates, logs)
    slopes = jnp.stack(rows)
    if space == "log":
        return value - target, slopes
    value = jnp.exp(value)
    return value - jnp.exp(target), slopes * value[None]


def minimize(
    law: Law,
    logs: Float[Array, "inputs n"],
    target: Float[Array, " n"],
    weights: Float[Array, "problems n"],
    starts: Float[Array, "problems k"],
    box: tuple[Float[Array, "*problems k"], Float[Array, "*problems k"]],
    settings: SolverSettings,
    *,
    space: Space = "log",
    num_lanes: int = 64,
) -> Solution:
    """Minimizes `sum(weights * huber(residuals))` for every problem.

    Args:
      law: law to fit.
      logs: log inputs, centred (`Law.shift`).
      target: log targets.
      weights: weights of the points, at least 0; for a resample, counts of its draws.
      starts: coordinates to start from, within the box.
      box: smallest and largest coordinates, of all problems or of each; steps end at
        the bounds.
      settings: see `SolverSettings`.
      space: see `law_residuals`.
      num_lanes: number of problems solved at once.

    Returns:
      The solution of every problem. If no step was finite, it is the start, with an
      infinite objective; so are problems beyond `num_problems`.
    """
    width, k = starts.shape
    axis = None if box[0].ndim == 1 else 0
    dtype = starts.dtype
    lanes = jnp.arange(min(num_lanes, width), dtype=jnp.int32)

    def walls(problem: Int32[Array, " lanes"]) -> Sequence[Float[Array, "*lanes k"]]:
        return box if axis is None else [x.at[problem].get(mode="clip") for x in box]

    def evaluate(
        x: Float[Array, " k"], weight: Float[Array, " n"], caution: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]:
        r, slopes = law_residuals(law, x, logs, target, space)
        return _objective(r, slopes, weight, settings.delta, caution)

    def fresh(problem: Int32[Array, " lanes"]) -> _Lane:
        size = problem.shape
        return _Lane(
            problem,
            starts.at[problem].get(mode="clip"),
            jnp.full(size, jnp.inf, dtype),
            jnp.zeros((*size, k), dtype),
            jnp.broadcast_to(jnp.eye(k, dtype=dtype), (*size, k, k)),
            jnp.full(size, _FIRST_DAMPING, dtype),
            jnp.ones(size, dtype),
            jnp.zeros(size, jnp.int32),
        )

    def advance(
        state: tuple[_Lane, Int32[Array, ""], Solution],
    ) -> tuple[_Lane, Int32[Array, ""], Solution]:
        lane, after, solution = state
        step = jax.vmap(_step, (0, axis, axis))
        move, promise = step(lane, *walls(lane.problem))
        steady = (promise < settings.tolerance) & (lane.damping < 1)
        ended = steady | (lane.damping > _LAST_DAMPING)
        ended &= jnp.isfinite(lane.objective)
        ended |= lane.num_steps >= settings.max_steps
        ended &= lane.problem < settings.num_problems
        place = jnp.where(ended, lane.problem, jnp.int32(width))
        values = Solution(lane.x, lane.objective, promise, lane.damping, lane.num_steps)
        solution = jax.tree.map(
            lambda all_, one: all_.at[place].set(one, mode="drop"), solution, values
        )
        nth = jnp.cumsum(ended, dtype=jnp.int32)
        lane = _where(ended, fresh(after + nth - 1), lane)
        move = jnp.where(ended[:, None], jnp.zeros_like(move), move)
        after += nth[-1]

        inside = jax.vmap(jnp.clip, (0, axis, axis))
        trial = inside(lane.x + move, *walls(lane.problem))
        weight = weights.at[lane.problem].get(mode="clip")
        evaluation = jax.vmap(evaluate)(trial, weight, lane.caution)
        better = evaluation[0] <= lane.objective
        lane = _Lane(
            lane.problem,
            *_where(better, (trial, *evaluation), lane[1:5]),
            jnp.where(better, jnp.maximum(0.3 * lane.damping, 1e-15), 5 * lane.damping),
            jnp.where(
                better,
                jnp.maximum(0.3 * lane.caution, _LEAST_CAUTION),
                jnp.minimum(4 * lane.caution, 1.0),
            ),
            lane.num_steps + 1,
        )
        return lane, after, solution

    nothing = Solution(
        starts,
        *(jnp.full(width, jnp.inf, dtype) for _ in range(3)),
        jnp.zeros(width, jnp.int32),
    )
    state = (fresh(lanes), jnp.int32(lanes.size), nothing)
    return jax.lax.while_loop(
        lambda state: jnp.any(state[0].problem < settings.num_problems), advance, state
    )[2]


def _objective(
    r: Float[Array, " n"],
    slopes: Float[Array, "k n"],
    weight: Float[Array, " n"],
    delta: float | Float[Array, ""],
    caution: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]:
    """Returns objective, gradient, and a matrix between Newton's and reweighting's."""
    size = jnp.abs(r)
    inside = size <= delta
    shrink = delta / jnp.maximum(size, delta)
    shrink = jnp.where(inside, jnp.ones_like(shrink), shrink)
    loss = jnp.where(inside, 0.5 * r * r, delta * (size - 0.5 * delta))
    # An infinite delta gives inf - inf in the branch that is not selected.
    objective = jnp.sum(weight * loss)
    gradient = slopes @ (weight * shrink * r)
    bend = weight * jnp.where(inside, jnp.ones_like(shrink), caution * shrink)
    hessian = (slopes * bend[None]) @ slopes.T
    finite = jnp.isfinite(objective) & jnp.all(jnp.isfinite(gradient))
    objective = jnp.where(finite, objective, jnp.full_like(objective, jnp.inf))
    return objective, gradient, hessian


def _step(
    lane: _Lane, low: Float[Array, " k"], high: Float[Array, " k"]
) -> tuple[Float[Array, " k"], Float[Array, ""]]:
    """Returns the next step, along the bounds that the slope points into."""
    x = lane.x
    gradient = lane.gradient
    hessian = lane.hessian
    stuck = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))
    zero = jnp.zeros_like(x)
    one = jnp.ones_like(x)
    gradient = jnp.where(stuck, zero, gradient)
    diagonal = jnp.diagonal(hessian)
    diagonal = diagonal * (1 + lane.damping) + 1e-30
    diagonal = jnp.where(stuck, one, diagonal)
    hessian = jnp.where(stuck[:, None] | stuck[None, :], zero[:, None], hessian)
    rows = [[*hessian[i, :i], diagonal[i]] for i in range(x.size)]
    move = -_cholesky_solve(rows, gradient)
    return move, -0.5 * jnp.sum(move * gradient)


def _cholesky_solve(
    rows: list[list[Float[Array, ""]]], b: Float[Array, " k"]
) -> Float[Array, " k"]:
    """Solves `A x = b` for small A, given by its lower triangle, written out.

    A batched LAPACK call for every step takes ten times as long as the rest of the
    step.
    """
    k = len(rows)
    lower: list[list[Array]] = []
    for i in range(k):
        line: list[Array] = []
        for j in range(i + 1):
            value = rows[i][j]
            for m in range(j):
                value = value - line[m] * (lower[j][m] if j < i else line[m])
            if i == j:
                # Rounding may leave zero: the step is zero along such a direction.
                positive = value > 1e-14 * rows[i][i]
                line.append(jnp.where(positive, jnp.sqrt(jnp.abs(value)), jnp.inf))
            else:
                line.append(value / lower[j][j])
        lower.append(line)
    y: list[Array] = []
    for i in range(k):
        value = b[i]
        for m in range(i):
            value = value - lower[i][m] * y[m]
        y.append(value / lower[i][i])
    x = [*y]
    for i in reversed(range(k)):
        value = y[i]
        for m in range(i + 1, k):
            value = value - lower[m][i] * x[m]
        x[i] = value / lower[i][i]
    return jnp.stack(x)


def _where[T: PyTree[Array]](mask: Bool[Array, " lanes"], new: T, old: T) -> T:
    """Selects lanes by a mask."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)


@validation.checks_numbers()
@functools.cache
def compiled_minimize(
    law: Law, space: Space, num_lanes: int = 64
) -> Callable[..., Solution]:
    """Returns `minimize` for a law, compiled once for every shape of its arguments."""
    return jax.jit(functools.partial(minimize, law, space=space, num_lanes=num_lanes))
