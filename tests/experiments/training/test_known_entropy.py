"""The experiment on known entropy: smoke run, stopped run, and verdicts."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.training.known_entropy import experiment, runs
from experiments.training.known_entropy.experiment import CONFIGS
from experiments.training.known_entropy.runs import train_language
from jaxkv.progress import QUIET
from scaling import corpora
from scaling.corpora import LanguageConfig
from scaling.sweeps import FinishedRun
from tests.support import smoke
from tests.support.impatience import Stopping
from tests.support.mutation import replace


@pytest.fixture(scope="module")
def result() -> experiment.Result:
    return smoke.run("known_entropy").result


@pytest.mark.slow
def test_no_loss_is_below_the_floor(result: experiment.Result) -> None:
    runs = result.runs
    floor = result.optima[-1]
    assert runs.width.tolist() == [8] * 4 + [16] * 4
    assert runs.num_tokens.tolist() == [2**12, 2**13, 2**14, 2**15] * 2
    assert (np.diff(result.optima) < 0).all()
    # The model learnt at least the frequency of each token.
    assert floor < min(runs.loss) < math.log(16) - 0.2
    np.testing.assert_array_less(-3, runs.excess / runs.excess_se)
    # The variation of the common text cancels in the excess.
    assert (runs.excess_se < runs.loss_se).all()
    np.testing.assert_allclose(
        runs.loss - runs.excess, (runs.loss - runs.excess)[0], rtol=1e-6
    )
    far, paired, *_ = experiment.claims(result)
    assert far.ours > -3
    assert paired.ours == pytest.approx(min(runs.excess / runs.excess_se))


@pytest.mark.slow
def test_a_leak_is_noticed(result: experiment.Result) -> None:
    """Losses are moved below the floor, like those of a model that sees its targets."""
    runs = result.runs
    moved = dataclasses.replace(runs, loss=runs.loss - 1, excess=runs.excess - 1)
    claims = experiment.claims(dataclasses.replace(result, runs=moved))
    assert [claim.verdict for claim in claims[:2]] == ["fails"] * 2


@pytest.mark.slow
def test_a_floor_must_be_covered_or_doubted(result: experiment.Result) -> None:
    floor = result.optima[-1]

    def verdict(identified: bool, high: float) -> str:
        fit = dataclasses.replace(
            result.fit,
            floor_low=floor - 0.1,
            floor_high=floor + high,
            identified=identified,
        )
        return experiment.claims(dataclasses.replace(result, fit=fit))[-2].verdict

    assert verdict(True, 0.1) == "holds"
    assert verdict(True, -0.05) == "fails"
    assert verdict(False, -0.05) == "holds"


@pytest.mark.slow
def test_counting_costs_half_a_nat_per_parameter(result: experiment.Result) -> None:
    counts = result.counts
    assert counts.num_free == 15
    assert counts.slope == pytest.approx(-1, abs=0.03)
    last = counts.excess[-1] * counts.num_tokens[-1]
    assert last == pytest.approx(7.5, rel=0.15)


def test_a_stopped_run_keeps_finished_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke_config = CONFIGS["smoke"]
    source = dataclasses.replace(smoke_config.source, seed=3)
    config = dataclasses.replace(smoke_config, source=source, seed=5)
    seeds = []

    def describe(end: FinishedRun) -> str:
        seeds.append(end.run.seed)
        return ""

    replace(monkeypatch, runs, "describe_run", describe)
    # The first run is that on the independent source.
    stopped_result = experiment.run(config, Stopping(3, "show"))
    assert seeds == [5, 5, 5]
    probs = corpora.zipf_probabilities(source.vocab_size, source.exponent)
    size = config.repeats, config.counted[0]
    counts = np.random.default_rng([3, 4]).multinomial(size[1], probs, size[0]) + 0.5
    nats = -np.log(counts / (size[1] + source.vocab_size / 2)) @ probs
    excess = nats.mean() + np.log(probs) @ probs
    assert stopped_result.counts.excess[0] == pytest.approx(excess, rel=1e-9)
    assert len(stopped_result.runs.loss) == 2
    assert not stopped_result.fit.identified
    assert experiment.metrics(stopped_result)["floor"] == stopped_result.optima[-1]


@pytest.mark.thorough
def test_branches_equal_separate_runs() -> None:
    """A branch off a longer trunk ends like a run of that length."""
    language = LanguageConfig(kind="kgram", num_tokens=2**13, num_held_out=2**12)
    config = CONFIGS["smoke"]

    def losses(*lengths: int) -> list[float]:
        runs = train_language(language, [8], lengths, config, QUIET)
        return runs.loss.tolist()

    assert losses(2**12)[0] == losses(2**12, 2**13)[0]
