"""Replays of public logs: which runs to make, and what they forecast."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from scaling import laws
from scaling.fits import FitProblem, make_observations, solve_weightings
from scaling.laws import CHINCHILLA
from scaling.plan import choose_next_runs, evidence_variance

OURS = "next"
RULES = (OURS, "random", "cheapest first", "grid", "D-optimal")
SHARES = (0.05, 0.1, 0.2, 0.5)
"""Shares of the pool's compute after which errors are measured."""
NUM_FIRST = 10
"""Cheapest runs, which every rule begins with."""


class ReplayPool(NamedTuple):
    """Runs that may be made, in the order of their compute, and held-out ones.

    Attributes:
      problem: fit problem of all runs of the pool.
      flops: compute of each run.
      held_logs: centred log N and log D of the held-out runs.
      held_losses: log losses of the held-out runs.
      target: geometric mean of the compute of the held-out runs.
    """

    problem: FitProblem
    flops: Float[np.ndarray, " n"]
    held_logs: Float[np.ndarray, "2 m"]
    held_losses: Float[np.ndarray, " m"]
    target: float

    def error(self, coordinates: Float[np.ndarray, " k"]) -> float:
        """Returns the mean absolute log error of the held-out runs."""
        value = laws.values(CHINCHILLA, coordinates[None], self.held_logs)[0]
        return float(np.abs(value - self.held_losses).mean())


def make_replay_pool(
    runs: Float[np.ndarray, "n 3"], is_held_out: Bool[np.ndarray, " n"]
) -> ReplayPool:
    """Divides runs (N, D, loss) into a pool and held-out ones."""
    pool = runs[~is_held_out]
    pool = pool[np.argsort(pool[:, 0] * pool[:, 1], kind="stable")]
    held = runs[is_held_out]
    names = ("num_params", "num_tokens", "loss")
    observations = make_observations(CHINCHILLA, dict(zip(names, pool.T, strict=True)))
    return ReplayPool(
        FitProblem(CHINCHILLA, observations),
        6 * pool[:, 0] * pool[:, 1],
        np.log(held[:, :2].T) - observations.centre[:, None],
        np.log(held[:, 2]),
        float(np.exp(np.log(6 * held[:, 0] * held[:, 1]).mean())),
    )


def fit_selected(
    pool: ReplayPool, is_made: Bool[np.ndarray, " n"]
) -> Float[np.ndarray, " k"]:
    """Fits the made runs from all starts of the law; one program for all masks."""
    starts = CHINCHILLA.starts(pool.problem.runs.level)
    weights = np.tile(is_made.astype(float), (len(starts), 1))
    ends = solve_weightings(pool.problem, weights, starts)
    return ends.coordinates[np.argmin(ends.objective)]


def replay_rule(
    pool: ReplayPool, rule: str, num_resamples: int, seed: int
) -> list[tuple[float, float, int]]:
    """Makes runs by a rule; returns share of compute, error and runs made.

    Args:
      pool: the runs.
      rule: a rule of `RULES`.
      num_resamples: resamples of `next`, with exponential weights of the runs.
      seed: seed of resamples and of the random order.
    """
    rng = np.random.default_rng(seed)
    flops = pool.flops
    is_made = np.arange(flops.size) < NUM_FIRST
    outcomes = []
    for share in SHARES:
        budget = share * flops.sum() - flops[is_made].sum()
        if budget > 0:
            is_made = _CHOOSE[rule](pool, is_made, budget, num_resamples, rng)
        error = pool.error(fit_selected(pool, is_made))
        outcomes.append((share, error, int(is_made.sum())))
    return outcomes


def _choose_next(pool, is_made, budget, num_resamples, rng):
    runs = pool.problem.runs
    best = fit_selected(pool, is_made)
    weights = rng.exponential(size=(num_resamples, runs.num_points)) * is_made
    samples = solve_weightings(
        pool.problem, weights, np.tile(best, (num_resamples, 1))
    ).coordinates
    residuals = laws.values(CHINCHILLA, best[None], runs.logs)[0] - runs.target
    num = int(is_made.sum())
    noise = max(float(np.mean(residuals[is_made] ** 2)) * num / (num - 4.5), 1e-6)
    rest = np.flatnonzero(~is_made)
    choice = choose_next_runs(
        laws.values(CHINCHILLA, samples, pool.held_logs).mean(1),
        laws.values(CHINCHILLA, samples, runs.logs)[:, rest],
        evidence_variance(noise, pool.flops[rest], pool.target),
        pool.flops[rest],
        budget=budget,
        max_runs=rest.size,
    )
    is_made = is_made.copy()
    is_made[rest[choice.places]] = True
    return is_made


def _choose_in_order(pool, is_made, budget, order):
    is_made = is_made.copy()
    for i in order:
        if not is_made[i] and pool.flops[i] <= budget:
            is_made[i] = True
            budget -= pool.flops[i]
    return is_made


def _choose_random(pool, is_made, budget, num_resamples, rng):
    return _choose_in_order(pool, is_made, budget, rng.permutation(is_made.size))


def _choose_cheapest(pool, is_made, budget, num_resamples, rng):
    return _choose_in_order(pool, is_made, budget, range(is_made.size))


def _choose_by_score(pool, is_made, budget, score):
    is_made = is_made.copy()
    while (allowed := ~is_made & (pool.flops <= budget)).any():
        place = int(np.argmax(np.where(allowed, score(is_made), -np.inf)))
        is_made[place] = True
        budget -= pool.flops[place]
    return is_made


def _choose_grid(pool, is_made, budget, num_resamples, rng):
    """Takes the run that is farthest from the made ones in ln N and ln D."""
    logs = pool.problem.runs.logs
    points = logs.T / logs.std(1)

    def score(made):
        return ((points[:, None] - points[None, made]) ** 2).sum(2).min(1)

    return _choose_by_score(pool, is_made, budget, score)


def _choose_d_optimal(pool, is_made, budget, num_resamples, rng):
    """Takes the run that raises ln det of the information most for each FLOP."""
    slopes = laws.slopes(
        CHINCHILLA, fit_selected(pool, is_made), pool.problem.runs.logs
    )
    slopes = slopes / np.sqrt((slopes**2).sum(0))

    def score(made):
        matrix = slopes[made].T @ slopes[made] + 1e-9 * np.eye(slopes.shape[1])
        spread = np.einsum("ni,ij,nj->n", slopes, np.linalg.inv(matrix), slopes)
        return np.log1p(spread) / pool.flops

    return _choose_by_score(pool, is_made, budget, score)


_CHOOSE = dict(
    zip(
        RULES,
        (
            _choose_next,
            _choose_random,
            _choose_cheapest,
            _choose_grid,
            _choose_d_optimal,
        ),
        strict=True,
    )
)
