"""Draws of resamples and the width of intervals: exact, then with seeded bugs."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaling.fits import intervals, levenberg_marquardt, make_observations
from scaling.laws import CHINCHILLA
from tests.support import mutation
from tests.support.mutation import Bug

RUN = np.repeat(np.arange(12), 1 + np.arange(12) % 3)
"""The run of every row: one to three rows of each."""


def test_a_resample_draws_whole_runs_as_many_as_there_are() -> None:
    rng = np.random.default_rng(0)
    data = {
        "num_params": 10 ** rng.uniform(7, 10, len(RUN)),
        "num_tokens": 10 ** rng.uniform(9, 11, len(RUN)),
        "loss": rng.uniform(2, 4, len(RUN)),
    }
    weights = rng.uniform(0.5, 2, len(RUN))
    observations = make_observations(CHINCHILLA, data, weights, RUN + 100)
    draws = levenberg_marquardt.draw_weights(observations, 400, rng)
    counts = draws / observations.weights
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-9)
    by_run = np.stack([counts[:, RUN == run].mean(axis=1) for run in range(12)], axis=1)
    np.testing.assert_allclose(by_run[:, RUN], counts)  # the same for all rows of a run
    np.testing.assert_allclose(by_run.sum(axis=1), 12)
    # A run occurs once on average, and is absent from (1 - 1/12)^12 of all resamples.
    assert by_run.mean(axis=0) == pytest.approx(np.ones(12), abs=0.2)
    left_out = np.mean(np.isclose(by_run, 0))
    assert left_out == pytest.approx((11 / 12) ** 12, abs=0.03)


@pytest.mark.parametrize(("delta", "variance"), [(1e-6, 1), (0.8, 0.8 / 3 + 0.2)])
def test_the_variance_of_a_mean_is_that_of_huber(
    monkeypatch: pytest.MonkeyPatch, delta: float, variance: float
) -> None:
    """Residuals are uniform in (-1, 1); variances are E[psi^2] / E[psi']^2.

    For a small delta that is the variance of the median, 1 / 4 f(0)^2 with f = 1 / 2.
    """
    num = 10_001
    residuals = np.linspace(-1, 1, num)
    slopes = np.ones((num, 1))
    problem: Any = SimpleNamespace(
        free=np.array([True]),
        box=(-np.inf, np.inf),
        objective=levenberg_marquardt.Objective(delta=delta),
        runs=SimpleNamespace(weights=np.ones(num), cluster=np.arange(num)),
    )
    monkeypatch.setattr(intervals, "_linearised", lambda *_: (residuals, slopes))
    _, covariance = intervals.curvature(problem, np.zeros(1))
    assert float(covariance[0, 0]) * num == pytest.approx(variance, rel=5e-3)
    rng: Any = SimpleNamespace(multivariate_normal=lambda _, spread, *__: spread)
    spread = intervals.draw_normal(problem, np.zeros(1), 1, rng)
    assert float(spread[0, 0]) * num == pytest.approx(variance, rel=5e-3)


def test_an_interval_has_its_level() -> None:
    samples = np.stack([np.arange(101.0), 2 * np.arange(101.0)], axis=1)
    middle = np.array([50.0, 100.0])
    low, high = intervals.percentile_intervals(
        middle, samples, 0.9, loss="huber", num_points=30, k=3
    )
    np.testing.assert_allclose([low, high], [[5, 10], [95, 190]])
    # Least squares: sqrt(30 / 27) * 1.7033 / 1.6449 times as wide.
    wider = math.sqrt(30 / 27) * 1.7033 / 1.6449
    low, high = intervals.percentile_intervals(
        middle, samples, 0.9, loss="mse", num_points=30, k=3
    )
    np.testing.assert_allclose(low, middle - wider * 0.9 * middle, atol=0.01)
    np.testing.assert_allclose(high, middle + wider * 0.9 * middle, atol=0.01)
    assert intervals.student_t(0.9, 27) == pytest.approx(1.7033, abs=1e-4)
    assert intervals.student_t(0.95, 2) == pytest.approx(4.3027, abs=1e-3)


RESAMPLES = (
    levenberg_marquardt,
    "draw_weights",
    test_a_resample_draws_whole_runs_as_many_as_there_are,
)
LEVELS = intervals, "percentile_intervals", test_an_interval_has_its_level
WIDTHS = intervals, "widening", test_an_interval_has_its_level


@pytest.mark.parametrize(
    ("place", "removed", "added"),
    [
        (RESAMPLES, "int(runs.cluster.max()) + 1", "len(runs.cluster)"),
        (RESAMPLES, "runs.cluster] * runs.weights", "runs.cluster] * 1.0"),
        (RESAMPLES, "multinomial(num_runs,", "multinomial(num_runs - 1,"),
        (
            RESAMPLES,
            "np.full(num_runs, 1 / num_runs)",
            "np.bincount(runs.cluster) / len(runs.cluster)",
        ),
        (LEVELS, "(1 - level) / 2, (1 + level) / 2", "1 - level, level"),
        (LEVELS, "axis=0", "axis=-1"),
        (LEVELS, 'loss == "mse"', 'loss == "lms"'),
        (WIDTHS, "num_points - k", "num_points"),
        (WIDTHS, "student_t(level, freedom)", "normal"),
    ],
)
def test_a_seeded_bug_of_resamples_or_intervals_is_detected(
    place: Any, removed: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, check = place
    bug = Bug(owner, name, removed, added, check)
    mutation.assert_noticed(monkeypatch, bug)
