"""The experiment on tiled attention measures every length and context."""

import numpy as np
import pytest

from experiments.serving.flash_attention import experiment
from experiments.serving.flash_attention.experiment import CONFIGS
from tests.support import smoke


@pytest.mark.slow
def test_smoke_measures_every_length() -> None:
    config = CONFIGS["smoke"]
    smoke_run = smoke.run("flash_attention")
    result = smoke_run.result
    assert result.length.tolist() == [*config.lengths]
    assert result.context.tolist() == [*config.contexts]
    for timings in (result.plain, result.flash):
        assert (timings.forward_s > 0).all()
        assert (timings.temporary_bytes > 0).all()
        assert (timings.error < 1e-4).all()
    assert [
        row["pieces of work, prompt"] for row in smoke_run.metrics["all queries"]
    ] == [
        8,
        8,
        16,
    ]
    # Timings on a shared machine are not tested; errors are.
    assert (result.flash.error <= 2 * result.plain.error).all()


def test_slopes_are_exponents() -> None:
    x = np.array([1.0, 2.0, 8.0])
    assert experiment._slope(x, 3 * x**1.5) == pytest.approx(1.5)
    assert np.isnan(experiment._slope(x[:1], x[:1]))
