"""Differences between sampler and trainer, and runs that were stopped."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from experiments.decoding.rollout_mismatch import experiment, peer_models, samplers
from experiments.harness import load_text_model
from experiments.harness.peers import peer_process
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


# Peers with the protocol of `peer_main`: probabilities of 1 / (2 + token).
FAKE = """
import json, math, sys
kind = sys.argv[2]
print(json.dumps({"version": "1"}), flush=True)
logprobs = lambda ids: [-math.log(2 + token) for token in ids]
for line in sys.stdin:
    asked = json.loads(line)
    if kind == "Transformers":
        answer = {"logprobs": [logprobs(ids[1:]) for ids in asked["sequences"]]}
    else:
        ids = [7 + asked["seed"]] * asked["sampled_tokens"]
        num = len(asked["prompts"])
        answer = {"tokens": [ids] * num, "logprobs": [logprobs(ids)] * num}
    print(json.dumps(answer | {"seconds": 0.5}), flush=True)
"""


def test_peers_sample_and_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(peer_process, "MAIN", tmp_path / "fake.py")
    model = load_text_model("stdlib-bytes", max_length=samplers.LENGTH)
    prompts = [[3, 4], [5, 6, 1]]
    with contextlib.ExitStack() as stack:
        (trainer, sampler), absent = peer_models.start_model_peers(
            stack, Path(sys.executable), model
        )
        assert trainer is not None
        assert sampler is not None
        assert not absent
        reported, seconds = sampler.sample(prompts, 2, seed=1)
        scores = trainer.score(reported)
    assert seconds == 0.5
    assert reported.tokens[1, :5].tolist() == [5, 6, 1, 8, 8]
    assert reported.lengths.tolist() == [4, 5]
    assert np.flatnonzero(reported.is_reported[1]).tolist() == [3, 4]
    expected = -np.log([8, 3, 10, 10])
    np.testing.assert_allclose(scores[1, :6], [0, *expected, 0], rtol=1e-6)
    assert samplers.measure_mismatch(reported.logprobs, scores).num_different == 0


def test_an_absent_peer_is_named() -> None:
    model = load_text_model("stdlib-bytes", max_length=samplers.LENGTH)
    with contextlib.ExitStack() as stack:
        peers, absent = peer_models.start_model_peers(stack, None, model)
        assert absent == "transformers, llama.cpp: no peer_python"
        assert peers == (None, None)
