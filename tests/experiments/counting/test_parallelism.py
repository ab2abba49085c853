"""Formulas against compiled programs; that an error in either is seen."""

import dataclasses

import numpy as np
import pytest

from experiments.counting.parallelism.experiment import CONFIGS, Config, claims, run


@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["smoke"],
        pytest.param(Config(layouts=("tp=4,sp,dp=2",)), marks=pytest.mark.slow),
    ],
)
def test_programs_send_what_the_formulas_say(config: Config) -> None:
    result = run(config)
    assert len(result.ways) == len(config.layouts)
    assert [claim for claim in claims(result) if claim.verdict != "holds"] == []
    np.testing.assert_array_equal(result.ways.sent_bytes, result.ways.found_bytes)
    off = dataclasses.replace(
        result.ways,
        sent_bytes=result.ways.sent_bytes + 4,
        params=result.ways.params - 1,
    )
    found = claims(dataclasses.replace(result, ways=off))
    failed = [claim for claim in found if claim.verdict == "fails"]
    assert len(failed) == 2 * len(config.layouts)
