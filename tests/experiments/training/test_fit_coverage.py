"""The study of coverage runs, judges only what it can tell, and holds."""

import pytest

from experiments.training.fit_coverage import experiment, surfaces
from jaxkv.progress import Quiet
from tests.support import smoke


def test_every_kind_of_surface_is_fitted() -> None:
    kept = smoke.run("fit_coverage")
    rows = kept.metrics["rows"]
    assert [row["kind"] for row in rows] == ["sound", "sound", *surfaces.ILL_POSED]
    assert all(0 <= row["neither"] <= 1 - row["doubted"] for row in rows)
    # Six surfaces tell nothing of one in ten.
    assert {claim.verdict for claim in kept.claims} == {"differs"}


class Hasty(Quiet):
    """Stops after the first surface."""

    stopped = False

    def bar(self, label: str, total: float | None, unit: str):
        def update(done: float) -> None:
            self.stopped = True

        return update


def test_ended_early_it_has_whole_kinds() -> None:
    config = experiment.Config(
        sizes=(32,), num_datasets=1, num_ill_posed=1, num_resamples=20
    )
    (row,) = experiment.run(config, Hasty())
    assert (row["kind"], row["noise"], row["surfaces"]) == ("sound", "student", 1)
    with pytest.raises(ValueError, match=r"sizes=.* must be numbers of at least 10"):
        experiment.Config(sizes=(5,))
    with pytest.raises(ValueError, match="at least 20"):
        experiment.Config(num_resamples=19)


@pytest.mark.slow
def test_intervals_cover_and_doubts_are_right() -> None:
    config = experiment.Config(sizes=(32,), num_datasets=200, num_ill_posed=30)
    claims = experiment.claims(experiment.run(config))
    assert {claim.verdict for claim in claims} == {"holds"}
    assert len(claims) == 9
