"""The experiment on known entropy: its smoke run, its stop, and its judgement."""

import math
from pathlib import Path

import numpy as np
import pytest

from experiments.framework import registry, run_folder
from experiments.training.known_entropy import experiment as known_entropy_experiment
from experiments.training.known_entropy.experiment import (
    CONFIGS,
    Config,
    Fit,
    Result,
    metrics,
    run,
)
from experiments.training.known_entropy.runs import model, train
from jaxkv.progress import QUIET, Quiet
from scaling.corpora.languages.language import LanguageConfig

pytestmark = pytest.mark.usefixtures("fast_compile")


@pytest.fixture(scope="module")
def result() -> Result:
    return run(CONFIGS["smoke"])


def test_no_loss_lies_below_the_floor(result: Result) -> None:
    runs, floor = result.runs, result.optima[-1]
    assert runs.width.tolist() == [8] * 4 + [16] * 4
    assert runs.num_tokens.tolist() == [2**12, 2**13, 2**14, 2**15] * 2
    assert (np.diff(result.optima) < 0).all()
    # It learnt at least how frequent each token is.
    assert floor < min(runs.loss) < math.log(16) - 0.2
    np.testing.assert_array_less(-3, runs.excess / runs.excess_se)
    # The text's chance, which both share, is not in the excess.
    assert (runs.excess_se < runs.loss_se).all()
    np.testing.assert_allclose(
        runs.loss - runs.excess, (runs.loss - runs.excess)[0], rtol=1e-6
    )
    claims = known_entropy_experiment.claims(result)
    assert [claim.verdict for claim in claims if "below" in claim.claim] == [
        "holds"
    ] * 2


def test_a_leak_is_noticed(result: Result) -> None:
    """Losses moved below the floor, as a model's that sees what it predicts."""
    moved = result.runs._replace(
        loss=result.runs.loss - 1, excess=result.runs.excess - 1
    )
    found = known_entropy_experiment.claims(result._replace(runs=moved))
    assert [claim.verdict for claim in found[:2]] == ["fails"] * 2


def test_a_floor_must_be_covered_or_doubted(result: Result) -> None:
    floor = result.optima[-1]
    fit = result.fit._replace(floor_low=floor - 0.1, floor_high=floor + 0.1)

    def verdict(fit: Fit) -> str:
        return known_entropy_experiment.claims(result._replace(fit=fit))[-2].verdict

    assert verdict(fit._replace(identified=True)) == "holds"
    wrong = fit._replace(floor_high=floor - 0.05)
    assert verdict(wrong._replace(identified=True)) == "fails"
    assert verdict(wrong._replace(identified=False)) == "holds"


def test_counting_pays_half_a_nat_for_each_parameter(
    result: Result,
) -> None:
    counts = result.counts
    assert counts.num_free == 15
    assert counts.slope == pytest.approx(-1, abs=0.03)
    last = counts.excess[-1] * counts.num_tokens[-1]
    assert last == pytest.approx(7.5, rel=0.15)


def test_it_is_drawn_and_read_back(result, tmp_path: Path) -> None:
    experiment = registry.load("known_entropy")
    run_folder.begin(tmp_path, experiment, CONFIGS["smoke"])
    kept = run_folder.finish(tmp_path, experiment, result, duration_s=1.0)
    assert kept.metrics["floor"] == result.optima[-1]
    assert (tmp_path / "figure.png").stat().st_size > 10_000


class Stopping(Quiet):
    """Stops after some runs."""

    def __init__(self, after: int) -> None:
        self.left, self.stopped = after, False

    def bar(self, label: str, total: float | None, unit: str):
        def update(done: float) -> None:
            assert total is not None
            assert done <= total
            self.left -= 1
            self.stopped = self.left == 0

        return update


def test_stopped_early_it_keeps_what_it_has() -> None:
    # The first of them is the independent source's.
    found = run(CONFIGS["smoke"], Stopping(3))
    assert len(found.runs.loss) == 2
    assert not found.fit.identified
    assert metrics(found)["floor"] == found.optima[-1]


def test_branches_are_runs_of_their_own() -> None:
    """A branch off a longer trunk ends as the run that was meant to be so short."""
    language = LanguageConfig(kind="kgram", num_tokens=2**13, num_held_out=2**12)
    shapes = [model(8, 1, 16, 32)]
    recipe = CONFIGS["smoke"].recipe

    def losses(*lengths: int) -> list[float]:
        found = train(language, shapes, lengths, recipe, QUIET)
        return found.loss.tolist()

    assert losses(2**12)[0] == losses(2**12, 2**13)[0]


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"widths=.* must be multiples of 4"):
        Config(widths=(6,))
    with pytest.raises(ValueError, match=r"num_tokens=.* must be at least the longest"):
        Config(lengths=(2**30,))
    with pytest.raises(ValueError, match=r"source.kind='markov' must be zipf"):
        Config(source=LanguageConfig(kind="markov"))
