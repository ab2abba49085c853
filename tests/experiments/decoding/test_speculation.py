"""Speculation on text: counts by hand, formulas, and tokens of plain decoding."""

from typing import Any

import numpy as np
import pytest

from experiments.decoding.speculation import on_text, serving, theory
from experiments.decoding.speculation.on_text import CONFIGS, Config, Result
from experiments.harness import CallTimes
from jaxkv.engine import StepInfo
from tests.support import smoke

STUDY = on_text.STUDY
SMOKE = CONFIGS["smoke"]


def test_tokens_and_operations_by_formula() -> None:
    assert theory.tokens_per_step(0.5, 2) == 1.75
    assert theory.tokens_per_step(1.0, 4) == 5.0
    assert theory.tokens_per_step(0.0, 4) == 1.0
    # Three fed rows, and two drafts at half a row's operations.
    assert theory.operations_per_token(0.5, 2, cost=0.5) == pytest.approx(4 / 1.75)
    rows = theory.expected_tokens(np.array([0.5, 1.0]), np.array([2, 4]))
    assert rows.tolist() == [1.75, 5.0]
    # 1, 2 and 3 tokens with probability 1/2, 1/4 and 1/4.
    spread = theory.token_deviation(np.array([0.5, 1.0]), np.array([2, 4]))
    np.testing.assert_allclose(spread, [(3.75 - 1.75**2) ** 0.5, 0.0])


def test_steps_counted_by_hand() -> None:
    """Two slots, three calls of two steps: prefill, then drafts, then an end."""
    emitted = np.array([[1, 0], [2, 1], [3, 1], [1, 2], [1, 1], [0, 2]])
    drafts = np.array([[0, 0], [2, 0], [2, 2], [2, 2], [0, 1], [0, 1]])
    fields: dict[str, Any] = dict.fromkeys(StepInfo._fields)
    fields |= {"num_emitted": emitted, "num_drafts": drafts}
    info = StepInfo(**fields)
    times = [CallTimes(0.0, ready_s, ready_s, True) for ready_s in (1.0, 3.5, 4.0)]
    counts = serving.count_decoding(info, times, 2)
    # The first token of each slot comes from its prefill, and the first slot is empty
    # in the last step: 4 steps and 5 steps.
    assert counts == serving.DecodeCounts(
        steps=4 + 4,
        emitted=(2 + 3 + 1 + 1) + (1 + 2 + 1 + 2),
        drafted=(2 + 2 + 2 + 0) + (2 + 2 + 1 + 1),
        first=2 + 2,
        call_s=2.5,
        call_steps=2,
    )
    plain = serving.count_decoding(info._replace(num_drafts=None), times, 2)
    assert plain == counts._replace(drafted=0)
    assert counts.plus(plain).steps == 16


def measured(*rows: tuple[Any, ...]) -> Result:
    """Returns a result with 100 steps and two rounds per method."""
    times = [3e-3, 2e-3], [1e-3, 1e-3]
    runs = [
        (method, num, batch, 0.0, 100, emitted, 100 * num, 50, *times, emitted, other)
        for method, num, batch, emitted, other in rows
    ]
    coins = [(0.5, 2, 2000, 3500)]
    tables = (
        on_text.DecodingRuns.of(runs),
        on_text.SyntheticDrafts.of(coins if rows else []),
    )
    return Result(*tables, output_tokens=200, num_drafts=2, device="cpu")


def test_metrics_follow_from_counts_and_times() -> None:
    decoding_result = measured(("n-gram", 2, 1, 250, 0), ("n-gram", 2, 4, 200, 3))
    runs = decoding_result.runs
    assert runs.tokens_per_step.tolist() == [2.5, 2.0]
    assert runs.accepted_share.tolist() == [0.75, 0.5]
    assert runs.first_share.tolist() == [0.5, 0.5]
    assert runs.expected.tolist() == [1.75, 1.75]
    np.testing.assert_allclose(runs.cost, 2.5)
    np.testing.assert_allclose(runs.speed, [1.0, 0.8])
    claims = smoke.measured_values(on_text.claims(decoding_result))
    assert claims["speculation changes no token of 450, greedy or sampled"] == 3
    best = "the best method decodes code at least 1.7 times as fast"
    assert claims[f"{best}, a single sequence, greedily"] == pytest.approx(1.0)
    [verdict] = [
        x.verdict for x in on_text.claims(decoding_result) if "furthest" in x.claim
    ]
    assert verdict == "holds"
    assert len(on_text.summary(decoding_result)) == 4
    assert smoke.draw(STUDY, decoding_result)


def test_an_empty_run_has_only_claims_on_formulas() -> None:
    nothing = measured()
    assert on_text.summary(nothing) == []
    judged = on_text.claims(nothing)
    assert len(judged) == 12
    for claim in judged:  # to the printed digits
        assert claim.ours == pytest.approx(claim.published, abs=0.005)
    assert smoke.draw(STUDY, nothing)


def test_each_case_is_measured_once() -> None:
    config = Config()
    alone = config.cases((1, 0.0))
    assert len(alone) == len(set(alone)) == 4 + 2 * len(config.lengths) - 2
    assert config.cases((1, 1.0)) == [(method, 3) for method in config.ways]
    assert config.cases((8, 0.0)) == [("n-gram", 3)]


@pytest.fixture(scope="module")
def result() -> Result:
    return smoke.run("speculation").result


@pytest.mark.slow
def test_tokens_equal_those_of_plain_decoding(result: Result) -> None:
    runs = result.runs
    # Two methods greedy and sampled, one with more drafts, and a batch.
    assert len(runs) == 2 + 2 + 1 + 1
    assert (runs.num_tokens == SMOKE.num_prompts * SMOKE.output_tokens).all()
    assert not runs.num_other.any()
    # All but the first token of an answer come from decoding steps.
    expected = SMOKE.num_prompts * (SMOKE.output_tokens - 1)
    assert (runs.emitted == expected).all()


@pytest.mark.slow
def test_counts_are_consistent(result: Result) -> None:
    runs = result.runs
    accepted = runs.emitted - runs.steps
    assert (accepted <= runs.drafted).all()
    assert (runs.first <= accepted).all()
    assert (runs.drafted <= runs.steps * runs.num_drafts).all()
    assert runs.step_s.shape == runs.plain_s.shape == (6, SMOKE.rounds)
    assert (runs.step_s > 0).all()
    # The same texts, one by one or in a batch.
    alone = runs.where(way="n-gram", num_drafts=2, batch=1, temperature=0.0)
    both = runs.where(batch=2)
    for name in ("steps", "emitted", "drafted", "first"):
        assert getattr(alone, name) == getattr(both, name)


@pytest.mark.slow
def test_synthetic_drafts_have_every_draft_length(result: Result) -> None:
    coins = result.coins
    assert coins.num_drafts.tolist() == [1, 3]
    assert (coins.steps > 20).all()
    assert (coins.emitted <= coins.steps * (1 + coins.num_drafts)).all()
    assert (np.abs(coins.off) < 4 * coins.error).all()


def test_the_model_must_have_a_long_enough_context() -> None:
    with pytest.raises(ValueError, match="max_length=896 must be at most"):
        on_text.run(Config(model=smoke.model(64)))
