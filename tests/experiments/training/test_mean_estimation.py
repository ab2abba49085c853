"""The first scaling law of the lectures follows from a simulation."""

import numpy as np
import pytest

from experiments.training.mean_estimation import experiment
from tests.support import smoke
from tests.support.impatience import Impatient


@pytest.mark.thorough
def test_the_slope_is_minus_one() -> None:
    found = smoke.run("mean_estimation").result
    assert found.slope_low < found.slope < found.slope_high
    assert found.slope_high - found.slope_low < 0.1
    assert found.slope == pytest.approx(-1, abs=0.05)


def test_a_stopped_run_has_no_fit() -> None:
    found = experiment.run(experiment.Config(), Impatient("means"))
    assert len(found.error) == 2
    assert np.isnan(found.slope)
    assert {claim.verdict for claim in experiment.claims(found)} == {"fails"}
