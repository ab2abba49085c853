"""The experiment on attention in tiles: what it measures is what it says."""

import numpy as np
import pytest

from experiments.plotting import style
from experiments.serving.flash_attention import experiment
from experiments.serving.flash_attention.experiment import CONFIGS, Config


@pytest.mark.thorough
def test_smoke_measures_every_length_and_says_what_holds() -> None:
    config = CONFIGS["smoke"]
    result = experiment.run(config)
    assert result.length.tolist() == [*config.lengths]
    assert result.context.tolist() == [*config.contexts]
    for way in (result.plain, result.flash):
        assert (way.forward_s > 0).all()
        assert (way.temporary_bytes > 0).all()
        assert (way.error < 1e-4).all()
    metrics = experiment.metrics(result)
    assert [row["pieces of work, prompt"] for row in metrics["all queries"]] == [
        *(8, 8, 16)
    ]
    # Timings of a busy machine decide nothing here; exactness does.
    exact = experiment.claims(result)[2]
    assert exact.verdict == "holds"
    files = style.render(
        lambda axes: experiment.plot(axes, result), panels=experiment.PANELS
    )
    assert files["figure.png"].startswith(b"\x89PNG")


def test_slopes_are_exponents() -> None:
    x = np.array([1.0, 2.0, 8.0])
    assert experiment._slope(x, 3 * x**1.5) == pytest.approx(1.5)
    assert np.isnan(experiment._slope(x[:1], x[:1]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(lengths=(4,)), "at least two, ascending"),
        (dict(contexts=(8, 4)), "at least two, ascending"),
        (dict(num_q_heads=3), "must be a multiple of"),
        (dict(repeats=0), "repeats=0 must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
