"""The benchmark of fits: equal minima for all methods, and the gradient."""

import numpy as np
import pytest

from experiments.bench.fit import experiment
from scaling.laws import simulate_isoflop_runs
from tests.support.commands import Command, document
from tests.support.impatience import Impatient


@pytest.mark.thorough
def test_every_method_has_a_row(jaxkv: Command) -> None:
    report = document(jaxkv, "bench", "fit", "smoke", "--out", "run")
    rows = report["rows"]
    assert [row["method"] for row in rows[:3]] == [
        "jaxkv",
        "jaxkv, first call",
        "NumPy gradient + SciPy BFGS",
    ]
    assert rows[-1]["method"] == "finite differences + SciPy BFGS"
    for row in rows:
        assert set(row) == {"method", "seconds", "worst_excess"}
        assert row["seconds"] > 0
        # All methods end near the same minima; jaxkv exceeds them by rounding only.
        assert row["worst_excess"] < (1e-8 if "jaxkv" in row["method"] else 1e-4)
    assert min(row["worst_excess"] for row in rows) < 1e-9
    assert report["details"][0]["resamples"] == 20


def test_a_stopped_run_has_complete_pieces() -> None:
    config = experiment.Config(num_points=32, num_resamples=6, num_pieces=3, slow=False)
    rows = experiment.run(config, Impatient("resamples"))
    assert [row["resamples"] for row in rows] == [4, 6, 4]
    assert "4 resamples of 32 runs" in str(experiment.summary(rows)[0])
    assert experiment.summary([]) == []


def test_analytic_gradient_equals_finite_differences() -> None:
    data = simulate_isoflop_runs(32)
    columns = (data[x] for x in ("num_params", "num_tokens", "loss"))
    runs = experiment.LossRuns(*map(np.log, columns))
    x = np.array([6.0073404, 6.0179186, 0.5267228, 0.33917084, 0.2849083])
    value, gradient = experiment.value_and_gradient(x, runs)
    assert value == pytest.approx(experiment.objective(x, runs))
    for i, step in enumerate(1e-7 * np.eye(5)):
        ends = [experiment.objective(x + sign * step, runs) for sign in (1, -1)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-7, rel=1e-4)
