"""The first scaling law of the lectures follows from a simulation."""

import numpy as np
import pytest

from experiments.training.mean_estimation import experiment
from tests.support import smoke
from tests.support.impatience import Impatient


@pytest.mark.thorough
def test_the_slope_is_minus_one() -> None:
    fit = smoke.run("mean_estimation").result
    assert fit.slope_low < fit.slope < fit.slope_high
    assert fit.slope_high - fit.slope_low < 0.1
    assert fit.slope == pytest.approx(-1, abs=0.05)


def test_a_stopped_run_has_no_fit() -> None:
    stopped_result = experiment.run(experiment.Config(), Impatient("means"))
    assert len(stopped_result.error) == 2
    assert np.isnan(stopped_result.slope)
    assert {claim.verdict for claim in experiment.claims(stopped_result)} == {"fails"}
