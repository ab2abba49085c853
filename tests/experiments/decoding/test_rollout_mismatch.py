"""Differences between sampler and trainer, and runs that were stopped."""

from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from experiments.decoding.rollout_mismatch import experiment, samplers
from jaxkv.progress import Quiet


class StoppedProgress(Quiet):
    """A progress bar that has been interrupted."""

    stopped = True

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        return iter(())


def test_a_stopped_run_has_no_claims() -> None:
    result = experiment.run(experiment.CONFIGS["smoke"], StoppedProgress())
    assert result.num_logprobs == 0
    assert experiment.claims(result) == []


def test_measures_of_mismatch() -> None:
    sampler = np.log(np.array([[0.5, 0.2, np.nan, 0.1]], np.float32))
    trainer = np.log(np.array([[0.5, 0.25, 0.3, 0.05]], np.float32))
    mismatch = samplers.measure_mismatch(sampler, trainer)
    assert (mismatch.num_tokens, mismatch.num_different) == (3, 2)
    ratios = np.array([1, 1.25, 0.5])
    assert mismatch.k1 == pytest.approx(-np.log(ratios).mean(), rel=1e-5)
    expected = (ratios - 1 - np.log(ratios)).mean()
    assert mismatch.k3 == pytest.approx(expected, rel=1e-5)
    assert mismatch.largest_logprob == pytest.approx(np.log(2), rel=1e-5)
    assert mismatch.largest_probability == pytest.approx(0.05, rel=1e-5)
