"""Speculation with synthetic acceptance: counts, the formula, and speeds by hand."""

import numpy as np
import pytest

from experiments.decoding.speculation import synthetic
from experiments.decoding.speculation.synthetic import Config, Result, TimedDrafts
from experiments.framework import load_experiment
from tests.support import smoke

STUDY = next(
    x for x in load_experiment("speculation").studies if x.run is synthetic.run
)
TINY = Config(
    shape="random-tiny",
    chances=(0.6,),
    drafts=(1, 3),
    prompt_tokens=5,
    output_tokens=150,
    rounds=2,
    steps_per_call=2,
)


def test_speeds_and_errors_by_hand() -> None:
    times = np.array([3e-3, 2e-3]), np.array([2e-3, 1e-3])
    priced = TimedDrafts.of([(0.5, 2, 100, 180, *times), (1.0, 3, 40, 160, *times)])
    np.testing.assert_allclose(priced.tokens_per_step, [1.8, 4.0])
    np.testing.assert_allclose(priced.expected, [1.75, 4.0])
    # 1, 2 and 3 tokens with probability 1/2, 1/4 and 1/4; 4 tokens with certainty.
    error = (3.75 - 1.75**2) ** 0.5 / 10
    np.testing.assert_allclose(priced.errors_off, [0.05 / error, 0.0])
    np.testing.assert_allclose(priced.cost, 1.75)
    np.testing.assert_allclose(priced.speed, np.array([1.8, 4.0]) / 1.75)
    np.testing.assert_allclose(priced.predicted, np.array([1.75, 4.0]) / 1.75)
    pricing_result = Result(priced, shape="a shape", device="cpu")
    [claim] = synthetic.claims(pricing_result)
    assert claim.verdict == "holds"
    assert claim.ours == pytest.approx(0.05 / error)
    few = Result(TimedDrafts.of([(0.5, 2, 9, 27, *times)]), "a shape", "cpu")
    assert [x.verdict for x in synthetic.claims(few)] == ["differs"]
    assert len(synthetic.STUDY.report_parts(pricing_result)) == 1
    assert smoke.draw(STUDY, pricing_result)


def test_an_empty_run_has_no_claims() -> None:
    nothing = Result(TimedDrafts.of([]), "a shape", "cpu")
    assert synthetic.STUDY.report_parts(nothing) == []
    assert [*synthetic.claims(nothing)] == []
    assert smoke.draw(STUDY, nothing)


def test_invalid_configs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^output_tokens=64 must be more than 64"):
        Config(output_tokens=64)
    with pytest.raises(ValueError, match=r"chances=\(1.5,\) must be in \[0, 1\]"):
        Config(chances=(1.5,))
    with pytest.raises(ValueError, match="must be ascending"):
        Config(drafts=(3, 1))


@pytest.mark.slow
def test_a_tiny_shape_follows_the_formula() -> None:
    priced = synthetic.run(TINY).priced
    assert priced.num_drafts.tolist() == [1, 3]
    assert (priced.steps > 100).all()
    assert (np.abs(priced.errors_off) < 4).all()
    assert (priced.emitted <= priced.steps * (1 + priced.num_drafts)).all()
    assert priced.step_s.shape == priced.plain_s.shape == (2, 2)
    assert (priced.step_s > 0).all()
    assert (priced.plain_s > 0).all()
