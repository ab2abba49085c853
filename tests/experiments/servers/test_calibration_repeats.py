"""A recorded fit, repeated with the optimisation of the record."""

import dataclasses

import numpy as np
import pytest

from experiments.framework import load_experiment
from jaxkv.report import read_run
from scaling.calibration import fit_posterior, predict_stage, read_measured_stages
from scaling.cli.calibrate.result import END_TO_END, FIRST_TOKEN, LATENCY_STATISTICS
from scaling.cli.calibrate.study import PUBLISHED_RUNS
from tests.support import traces
from tests.support.folders import RECORDS

pytestmark = pytest.mark.usefixtures("full_optimization")


@pytest.mark.slow
def test_recorded_predictions_follow_from_their_fitted_stages_again() -> None:
    result = read_run(RECORDS / "calibration", load_experiment("calibration")).result
    stages = read_measured_stages(traces.find(PUBLISHED_RUNS))
    fit = int(np.flatnonzero(result.fits.name == "mixtral-8x7b")[0])
    names = result.fits.stages[fit].split()
    posterior = fit_posterior([x for x in stages if x.name in names], num_draws=64)
    for stage in stages:
        recorded = result.predictions.where(fit=fit, stage=stage.name)
        if not len(recorded):
            continue
        unmeasured = dataclasses.replace(
            stage, end_to_end_s=None, first_token_s=None, inter_token_s=None
        )
        prediction = predict_stage(unmeasured, posterior)
        for name in (END_TO_END, FIRST_TOKEN):
            latency, statistic = LATENCY_STATISTICS[name]
            median_s = np.median(getattr(getattr(prediction, latency), statistic))
            # Other processors round differently, and simulations are not smooth.
            expected_s = recorded.where(latency=name).predicted_s[0]
            assert median_s == pytest.approx(expected_s, rel=0.03), (stage.name, name)
