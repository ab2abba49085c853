"""Two-stage laws of tasks: exact recovery, rehearsed intervals."""

import numpy as np
import pytest

from scaling.forecasts import fit_tasks, predict_tasks
from scaling.logs import DownstreamTask, TaskRuns
from tests.support.refusals import refused

TASK = DownstreamTask("quiz", ("loss",), ("accuracy",), (1.0,), 0.25)
TRUTH = {"E": 0.5, "A": 40.0, "B": 90.0, "alpha": 0.25}


def make_runs(
    sizes: tuple[float, ...] = (2e8, 4e8, 8e8, 1.6e9), noise: float = 0.0
) -> TaskRuns:
    rng = np.random.default_rng(0)
    n = np.repeat(sizes, 4)
    d = n * 20 * np.tile([0.5, 1, 3, 10], len(sizes))
    loss = 0.5 + 40 * n**-0.25 + 90 * d**-0.25
    accuracy = 0.25 + 0.75 / (1 + np.exp(6 * (loss - 0.8)))
    loss = loss * np.exp(noise * rng.normal(size=n.size))
    accuracy = accuracy * np.exp(noise * rng.normal(size=n.size))
    names = tuple(f"run {i}" for i in range(n.size))
    is_held_out = np.zeros(n.size, bool)
    return TaskRuns(names, n, d, {"quiz": loss}, {"quiz": accuracy}, is_held_out)


def test_exact_runs_return_their_coefficients_and_predict_a_larger_run() -> None:
    forecasts = fit_tasks((TASK,), make_runs())
    fit = forecasts.tasks["quiz"]
    for name, value in TRUTH.items():
        assert fit.powers._asdict()[name] == pytest.approx(value, rel=1e-4)
    assert fit.response == pytest.approx((0.25, 6.0, 0.8), rel=1e-4)
    assert forecasts.warnings == []
    n, d = np.array([1e10]), np.array([1e12])
    loss = 0.5 + 40 * n**-0.25 + 90 * d**-0.25
    prediction = predict_tasks(forecasts, n, d)["quiz"]
    np.testing.assert_allclose(prediction.loss, loss, rtol=1e-4)
    accuracy = 0.25 + 0.75 / (1 + np.exp(6 * (loss - 0.8)))
    np.testing.assert_allclose(prediction.accuracy, accuracy, rtol=1e-4)
    assert abs(prediction.log_linear - accuracy) > 0.01


def test_an_interval_covers_the_rehearsed_errors_and_grows_with_compute() -> None:
    forecasts = fit_tasks((TASK,), make_runs(noise=0.01))
    # Two and three of four sizes are fitted; all runs of the larger ones are errors.
    assert [x.num_sizes for x in forecasts.rehearsals] == [2] * 8 + [3] * 4
    scores = [
        abs(x.logit_error) / forecasts.scales("quiz", x.distance)[1]
        for x in forecasts.rehearsals
    ]
    n = np.array([1.6e9, 1e10, 1e11])
    prediction = predict_tasks(forecasts, n, 20 * n, level=0.8)["quiz"]
    logits = [np.log(x / (1 - x)) for x in (prediction.high, prediction.accuracy)]
    half = logits[0] - logits[1]
    distance = np.log(6 * 20 * n**2 / forecasts.largest_flops)
    scale = np.hypot(
        forecasts.tasks["quiz"].accuracy_noise,
        forecasts.accuracy_drift * np.maximum(distance, 0),
    )
    # 1.8856 is the 90 % quantile of Student's t with 2 degrees of freedom.
    factor = max(1.8856, np.quantile(scores, 0.8))
    np.testing.assert_allclose(half, factor * scale, rtol=1e-4)
    assert (np.diff(half) > 0).all()


def test_too_few_runs_are_refused_and_two_sizes_warn() -> None:
    with refused("4 runs of 1 sizes: a fit of tasks needs at least 6 runs and 2 sizes"):
        fit_tasks((TASK,), make_runs((2e8,)))
    (warning,) = fit_tasks((TASK,), make_runs((2e8, 4e8), noise=0.01)).warnings
    assert "2 sizes allow no rehearsal" in warning
