"""Traffic formulas compared with compiled programs; errors in either are detected."""

import dataclasses

import numpy as np
import pytest

from experiments.counting.parallelism.experiment import CONFIGS, Config, claims, run


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIGS["smoke"], marks=pytest.mark.thorough),
        pytest.param(Config(layouts=("tp=4,sp,dp=2",)), marks=pytest.mark.slow),
    ],
)
def test_traffic_of_programs_equals_the_formulas(config: Config) -> None:
    result = run(config)
    ways = result.ways
    assert len(ways) == len(config.layouts)
    np.testing.assert_array_equal(ways.sent_bytes, ways.found_bytes)
    np.testing.assert_array_equal(ways.params, ways.params_given)
    # Norms, activations, the softmax and the loss are counted only by XLA.
    np.testing.assert_allclose(ways.flops, ways.flops_found, rtol=0.02)
    off = dataclasses.replace(
        ways, sent_bytes=ways.sent_bytes + 4, params=ways.params - 1
    )
    changed_claims = claims(dataclasses.replace(result, ways=off))
    noticed = [
        (before.verdict, after.verdict)
        for before, after in zip(claims(result), changed_claims, strict=True)
        if before.ours != after.ours
    ]
    assert noticed == [("holds", "fails")] * (2 * len(config.layouts))
