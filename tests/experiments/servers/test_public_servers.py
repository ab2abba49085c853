"""The record of public servers: what its fits saw, and the published fit."""

import json

import numpy as np

from experiments.framework import load_experiment
from jaxkv.report import read_run
from scaling.calibration import (
    PUBLIC_SPLIT,
    PUBLISHED_LOOPS,
    PUBLISHED_POWER,
    load_loops,
)
from scaling.cli import ServerTablesResult
from tests.support.folders import RECORDS


def record() -> ServerTablesResult:
    name = "public_servers"
    return read_run(RECORDS / name, load_experiment(name)).result


def test_recorded_predictions_are_of_fits_that_never_saw_their_model() -> None:
    """Each row has the fold of its shape, and the split is the committed one."""
    result = record()
    assert result.split == PUBLIC_SPLIT
    assert result.num_fitted == 2363
    rows = result.predictions.where(left_out="model", quantity="time per token")
    assert len(rows) == result.num_fitted
    folds = dict(zip(rows.model.tolist(), rows.fold.tolist(), strict=True))
    pairs = {*zip(rows.model.tolist(), rows.fold.tolist(), strict=True)}
    assert len(pairs) == len(folds)
    # Checkpoints of one shape are one fold, under one of their names.
    assert {*folds.values()} <= {*folds}
    assert folds["deepseek-r1"] == folds["deepseek-v3"]


def test_rooflines_are_those_of_the_same_rows() -> None:
    """Data sheets are faster than servers, and the fit is nearer."""
    errors = record().group_errors("model", "kind")
    for row in errors.where(quantity="time per token").rows():
        assert row["roofline"] < -0.3
        assert row["median"] < 0.5 * abs(row["roofline"])
    assert np.isnan(errors.where(quantity="power").roofline).all()


def test_the_published_fit_is_that_of_the_record() -> None:
    assert record().server == PUBLISHED_LOOPS.read_text()
    power = json.loads(PUBLISHED_LOOPS.read_text())["power"]
    np.testing.assert_allclose([*power.values()], PUBLISHED_POWER, rtol=1e-3)
    calibration = load_loops()
    assert calibration.dense is not None
    assert calibration.mixture is not None
    assert calibration.dense.num_rows < calibration.mixture.num_rows
