"""The study of coverage runs, judges only what it can tell, and holds."""

import pytest

from experiments.training.fit_coverage import experiment, surfaces
from tests.support import smoke
from tests.support.impatience import Stopping


def test_every_kind_of_surface_is_fitted() -> None:
    kept = smoke.run("fit_coverage")
    rows = kept.metrics["rows"]
    assert [row["kind"] for row in rows] == ["sound", "sound", *surfaces.ILL_POSED]
    assert all(0 <= row["neither"] <= 1 - row["doubted"] for row in rows)
    # Six surfaces tell nothing of one in ten.
    assert {claim.verdict for claim in kept.claims} == {"differs"}


def test_ended_early_it_has_whole_kinds() -> None:
    config = experiment.Config(
        sizes=(32,), num_datasets=1, num_ill_posed=1, num_resamples=20
    )
    (row,) = experiment.run(config, Stopping(1))
    assert (row["kind"], row["noise"], row["surfaces"]) == ("sound", "student", 1)


@pytest.mark.slow
def test_intervals_cover_and_doubts_are_right() -> None:
    config = experiment.Config(sizes=(32,), num_datasets=200, num_ill_posed=30)
    claims = experiment.claims(experiment.run(config))
    assert {claim.verdict for claim in claims} == {"holds"}
    assert len(claims) == 9
