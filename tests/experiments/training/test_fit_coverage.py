"""The study of coverage fits every kind of surface and judges large samples."""

import pytest

from experiments.training.fit_coverage import experiment
from scaling.laws import ILL_POSED
from tests.support import smoke
from tests.support.impatience import Stopping


@pytest.mark.slow
def test_every_kind_of_surface_is_fitted() -> None:
    smoke_run = smoke.run("fit_coverage")
    rows = smoke_run.metrics["rows"]
    assert [row["kind"] for row in rows] == ["sound", "sound", *ILL_POSED]
    assert all(0 <= row["neither"] <= 1 - row["doubted"] for row in rows)
    # Six surfaces are too few for a verdict.
    assert {claim.verdict for claim in smoke_run.claims} == {"differs"}


def test_a_stopped_run_keeps_whole_kinds() -> None:
    config = experiment.Config(
        sizes=(32,), num_datasets=1, num_ill_posed=1, num_resamples=20
    )
    (row,) = experiment.run(config, Stopping(1))
    assert (row["kind"], row["noise"], row["surfaces"]) == ("sound", "student", 1)


@pytest.mark.slow
def test_intervals_cover_and_warnings_are_right() -> None:
    config = experiment.Config(sizes=(32,), num_datasets=200, num_ill_posed=30)
    sound, ill = experiment._kinds(experiment.run(config))
    assert [row["noise"] for row in sound] == ["student", "normal"]
    for row in sound:
        # 200 surfaces: 4 standard errors about 90 %.
        for name in experiment.QUANTITIES:
            assert 0.815 < row[f"covers {name}"] < 0.985
        assert row["doubted"] <= 0.05
    assert [row["kind"] for row in ill] == [*ILL_POSED]
    for row in ill:
        assert row["neither"] <= 0.1
        assert row["doubted"] >= 0.9
