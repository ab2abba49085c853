"""The lectures' numbers: bounds computed by hand, claims and answers."""

import numpy as np
import pytest

from experiments.counting.lecture_numbers import bounds, experiment
from experiments.counting.lecture_numbers.bounds import Config


@pytest.fixture(scope="module")
def result() -> bounds.Result:
    return bounds.run(experiment.CONFIGS["paper"])


def test_bounds_of_the_table(result: bounds.Result) -> None:
    latencies = result.latencies
    assert latencies.num_devices.tolist() == [9, 1, 1, 1, 1]
    # 256 x 349.2 GB at 10 x 1,555 GB/s, plus a small part for keys and values.
    weights = 256 * 2 * 174_563_733_504 / 15_550e9
    assert latencies.bound_s[0] == pytest.approx(weights, rel=4e-3)
    assert latencies.bound_s[0] > weights
    np.testing.assert_allclose(latencies.turns_s, latencies.bound_s * latencies.used)


def test_kv_cache_sizes(result: bounds.Result) -> None:
    assert (result.kept.small, result.kept.large) == (524_288, 819_200)
    assert result.kept.request == 2048 * 819_200
    left = 160e9 - 2 * 68_976_648_192
    assert result.kept.tokens_70b == pytest.approx(left / 327_680)


def test_request_rates(result: bounds.Result) -> None:
    # 338 tokens of 25.7 GB each, one request at a time.
    alone = 1555e9 / (338 * 2 * 12_851_609_600)
    assert result.requests.alone == pytest.approx(alone, rel=0.02)
    left = (40e9 - 2 * 13_015_864_320) / (819_200 * 330)
    assert result.requests.batch == int(left)
    assert 1 < result.requests.together < result.requests.batch * alone


def test_operations_with_and_without_a_kv_cache(result: bounds.Result) -> None:
    growth = result.growth
    for i, t in enumerate(growth.length):
        squares = sum(x * x for x in range(1, t + 1))
        assert growth.scores_without[i] == 32 * 4 * 4096 * squares
        assert growth.scores_with[i] == 32 * 4 * 4096 * t * (t + 1) // 2
    fed = growth.all_with[0] - growth.scores_with[0]
    assert fed == 2 * 6_607_077_376 * growth.length[0]


def test_claims_fail_for_a_slower_gpu(result: bounds.Result) -> None:
    slow = bounds.run(Config(device="t4"))
    failed = [x for x in experiment.claims(slow) if x.verdict == "fails"]
    # A 13B model does not fit, and cannot be read 256 times in 7.6 s.
    assert any("fit one A100" in claim.claim for claim in failed)
    assert any("13B" in claim.claim for claim in failed)


def test_answers_contain_the_numbers(result: bounds.Result) -> None:
    output = experiment.spoken_answers(result)
    assert output["Do we cache Q?"].startswith("No.")
    assert "524,288 bytes per token" in output["Do we cache Q?"]
    one = output["Which limit binds at b = s = 1?"]
    assert "1.00 operations per byte" in one
    assert "needs 201" in one
    assert "64 for 64 sequences" in output["How does a batch change the intensity?"]
