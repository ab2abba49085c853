"""The study of coverage runs, judges only what it can tell, and holds."""

import json
from pathlib import Path

import pytest

from experiments.cli import main
from experiments.training.fit_coverage import experiment, surfaces
from jaxkv.progress import Quiet


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["run", "fit_coverage", "smoke", "--out", str(tmp_path / "run"), "--json"]
    assert main.main(args) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["metrics"]["rows"]
    assert [row["kind"] for row in rows] == ["sound", "sound", *surfaces.ILL_POSED]
    assert all(0 <= row["neither"] <= 1 - row["doubted"] for row in rows)
    # Six surfaces tell nothing of one in ten.
    assert {claim["verdict"] for claim in document["claims"]} == {"differs"}


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
