"""Simulated prefill queues against the formulas of queueing theory."""

import numpy as np
import pytest

from experiments.serving.disaggregation.queues import formula_s, simulate_queues
from experiments.serving.disaggregation.settings import Config
from jaxkv.workloads import md1_waiting_s

# 48,000 requests are simulated, which takes 20 times as long without optimisation.
pytestmark = pytest.mark.usefixtures("full_optimization")


@pytest.mark.slow
def test_waiting_times_follow_the_formulas() -> None:
    assert formula_s("one", 5.0) == pytest.approx(0.15)
    # Two stages of D / 2; the first is an M/D/1 queue.
    waiting_s = formula_s("two pipeline stages", 5.0)
    assert waiting_s == pytest.approx(0.1 + md1_waiting_s(5.0, 0.05))
    waiting_s = formula_s("two tensor ways", 5.0)
    assert waiting_s == pytest.approx(0.1 / 1.5 + md1_waiting_s(5.0, 0.1 / 1.5))
    queues = simulate_queues(
        Config(queue_loads=(0.3,), queue_requests=1000, queue_seeds=16, seed=1)
    )
    off = np.abs(queues.simulated_s - queues.formula_s)
    assert (off < 4 * queues.error_s).all()
    assert (queues.error_s < 0.1 * queues.waiting_s).all()
