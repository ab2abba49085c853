"""Least squares: linear problems, Huber's loss in one dimension, bounds."""

import numpy as np

from scaling.forecasts.least_squares import minimize_huber


def test_a_linear_problem_has_its_exact_solution() -> None:
    rng = np.random.default_rng(0)
    slopes = rng.normal(size=(20, 3))
    target = rng.normal(size=20)
    end = minimize_huber(lambda x: (slopes @ x - target, slopes), np.zeros(3))
    exact = np.linalg.lstsq(slopes, target, rcond=None)[0]
    np.testing.assert_allclose(end.coefficients, exact, rtol=1e-8)
    assert end.is_converged


def test_huber_s_loss_ignores_the_size_of_an_outlier() -> None:
    target = np.array([0.0, 0.01, 0.02, 5.0])

    def residuals(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x[0] - target, np.ones((4, 1))

    def objective(x: float) -> float:
        size = np.abs(x - target)
        clipped = np.minimum(size, 0.1)
        return float((clipped * (size - clipped / 2)).sum())

    end = minimize_huber(residuals, np.array([3.0]), delta=0.1)
    grid = np.linspace(0, 0.2, 20001)
    best = grid[np.argmin([objective(x) for x in grid])]
    assert abs(end.coefficients[0] - best) < 1e-4
    assert abs(end.objective - objective(best)) < 1e-8


def test_a_bound_holds_and_frees_the_rest() -> None:
    slopes = np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    target = np.array([3.0, 1.0, 2.0])
    high = np.array([1.0, np.inf])
    end = minimize_huber(
        lambda x: (slopes @ x - target, slopes), np.zeros(2), high=high
    )
    # With the first at 1, the second minimizes (1 + y - 3)^2 + (y - 1)^2.
    np.testing.assert_allclose(end.coefficients, [1.0, 1.5], rtol=1e-8)
