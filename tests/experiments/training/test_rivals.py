"""The comparison of rivals is fair, and its verdicts follow from fitted curves."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.harness import judge_direction
from experiments.training.rivals import experiment
from experiments.training.rivals import runs as rivals_runs
from experiments.training.rivals import settings as rivals_settings
from experiments.training.rivals.runs import NUM_TRIALS, SideResult, SideRuns
from experiments.training.rivals.settings import PUBLISHED_PAIRS, REFERENCE, Published
from jaxkv.progress import Quiet
from scaling.frontiers import best_runs
from scaling.sweeps import next_rate
from scaling.training import count_model_parameters, resize_model
from tests.support import smoke
from tests.support.impatience import Stopping

(STUDY,) = load_experiment("rivals").studies


@pytest.mark.slow
def test_smoke_runs_to_a_verdict() -> None:
    config = STUDY.configs["smoke"]
    result = smoke.run("rivals").result
    assert list(result.sides) == ["transformer", "lstm"]
    runs = result.runs
    assert len(runs.loss) == 2 * 2 * 3
    assert runs.seed.tolist() == 2 * (3 * [0] + 3 * [1])
    for size in config.sizes:
        num_params = runs.num_params_non_embedding[runs.size == size]
        assert np.all(np.abs(num_params / size - 1) < 0.05)
        # Both sides try the same number of rates.
        counts = [
            np.sum((result.trials.side == i) & (result.trials.size == size))
            for i in range(2)
        ]
        assert counts == [NUM_TRIALS] * 2
    assert np.all(runs.num_tokens == np.tile([5, 10, 20], 4) * 4 * 32)
    assert np.all(runs.flops > runs.flops_6nd)
    # Far below the loss of a uniform guess, and above a plausible minimum.
    assert np.all((runs.loss > 1) & (runs.loss < math.log(257) - 1))
    # A difference is the mean over seeds of the longest runs.
    longest = runs.loss[2::3].reshape(2, 2)
    apart = result.differences
    np.testing.assert_allclose(apart.by_seed, longest[1:] - longest[:1])
    np.testing.assert_allclose(apart.difference, apart.by_seed.mean(1))
    assert abs(longest[0, 0] - longest[0, 1]) > 1e-3
    # Results do not depend on concurrent training.
    alone = STUDY.run(dataclasses.replace(config, num_threads=1))
    for name in SideRuns.columns().keys() - {"seconds"}:
        np.testing.assert_array_equal(getattr(runs, name), getattr(alone.runs, name))
    np.testing.assert_array_equal(result.places.loss, alone.places.loss)
    assert STUDY.metrics(result)["differences"]


class Impatient(Quiet):
    """Stops when the second side is reported."""

    def show(self, content: str) -> None:
        self.stopped = self.stopped or content.startswith("lstm")


@pytest.mark.slow
def test_a_stopped_run_keeps_finished_sides() -> None:
    config = dataclasses.replace(STUDY.configs["smoke"], num_threads=1)
    result = STUDY.run(config, Impatient())
    assert set(result.runs.side) == {0}
    assert len(result.runs.loss) == 2 * 3
    assert len(result.differences.side) == 0
    assert np.isnan(result.places.lead[1])
    assert STUDY.claims(result) == []
    assert STUDY.report_parts(result)
    assert smoke.draw(STUDY, result)
    nothing = STUDY.run(config, Stopping(0))
    assert nothing.runs.loss.size == 0
    assert STUDY.metrics(nothing)["ratios"] == []
    assert STUDY.report_parts(nothing)


SURFACE = [
    (6 * size * tokens, 1.2 + 8 / size**0.25 + 12 / tokens**0.25, size)
    for size in (1e4, 3e4, 9e4)
    for tokens in (1e5, 2e5, 4e5, 8e5)
]
FLOPS, LOSS, SIZE = np.array(SURFACE).T
"""Runs on a known surface."""


def resampled(scale: float, seed: int) -> list[best_runs.FrontierFit | None]:
    """Resamples whole sizes, with `scale` times the compute at equal losses."""
    return best_runs.resample_fits(
        FLOPS * scale, LOSS, SIZE[:, None].astype(int), count=20, seed=seed
    )


def test_the_ratio_of_compute_follows_from_two_curves() -> None:
    first, second = (
        best_runs.fit_best_runs(FLOPS * scale, LOSS) for scale in (1.0, 3.0)
    )
    assert first is not None
    comparison = best_runs.compare_best_runs(
        first, second, (resampled(1.0, 0), resampled(3.0, 0))
    )
    np.testing.assert_allclose(comparison.ratio, 3, rtol=1e-3)
    # With equal resamples the ratio is constant; otherwise it spreads.
    np.testing.assert_allclose([comparison.low, comparison.high], 3, rtol=1e-3)
    apart = best_runs.compare_best_runs(
        first, second, (resampled(1.0, 0), resampled(3.0, 1))
    )
    assert apart.low[0] < 3 < apart.high[0]
    # The curve passes through the runs, and ends at their ends.
    curve = best_runs.evaluate_fit(first)
    best = best_runs.find_best_runs(FLOPS, LOSS)
    assert curve.flops[[0, -1]] == pytest.approx([FLOPS.min(), FLOPS.max()])
    near = np.interp(np.log(FLOPS[best]), np.log(curve.flops), curve.loss)
    assert np.abs(near - LOSS[best]).max() < 3 * curve.residual < 0.06


def test_the_frontier_excludes_runs_that_a_cheaper_run_beats() -> None:
    flops = np.array([4.0, 1.0, 2.0, 2.0, 8.0])
    loss = np.array([3.0, 5.0, 4.0, 3.5, 3.0])
    assert best_runs.find_best_runs(flops, loss).tolist() == [1, 3, 0]


STEPS = np.arange(len(LOSS))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (LOSS[:1], "fewer than 4 runs"),
        (LOSS + 5, "do not overlap"),
        (2.0 - 0.1 * STEPS - 2 * (STEPS > 6), "misses its runs"),
    ],
)
def test_an_unsupported_ratio_is_refused(loss, reason: str) -> None:
    first = best_runs.fit_best_runs(FLOPS, LOSS)
    second = best_runs.fit_best_runs(FLOPS[: len(loss)], loss)
    comparison = best_runs.compare_best_runs(first, second)
    assert reason in str(comparison.reason)
    assert np.isnan(comparison.ratio).all()


def test_an_unbounded_interval_is_not_identified() -> None:
    first = best_runs.fit_best_runs(FLOPS, LOSS)
    comparison = best_runs.compare_best_runs(
        first, first, ([first, first], [first, None])
    )
    assert np.all(comparison.ratio == 1)
    assert np.isnan([comparison.low, comparison.high]).all()


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3, 2, 1), 8.0),
        ((1, 2, 3), 0.5),
        ((3, 1, 2), math.sqrt(8)),
        ((2, 1, math.nan), math.sqrt(2)),
    ],
)
def test_the_next_rate_extends_or_refines_the_grid(losses, expected) -> None:
    trials = list(zip((1.0, 2.0, 4.0), map(float, losses), strict=True))
    assert next_rate(trials) == pytest.approx(expected)


def test_sides_differ_as_their_names_state() -> None:
    config = STUDY.configs["cpu"]
    sides = {
        name: rivals_settings.side(
            name, vocab_size=257, seq_len=256, head_dim=config.head_dim
        )
        for name in (REFERENCE, *PUBLISHED_PAIRS)
    }
    plain: Any = sides["transformer"].base
    for name, side in sides.items():
        base: Any = side.base
        for size in config.sizes:
            counts = count_model_parameters(resize_model(base, size))
            assert abs(counts.non_embedding / size - 1) < 0.05, name
        if name not in ("lstm", "gru"):
            ours, plain_fields = (dataclasses.asdict(x) for x in (base, plain))
            differ = {key for key in ours if ours[key] != plain_fields[key]}
            assert len(differ - {"mlp_size", "activation"}) <= 1
    assert sides["sgd"].base == plain
    assert sides["sgd"].optimizer.kind == "sgd"
    assert sides["lstm"].optimizer == sides["transformer"].optimizer
    assert len({len(side.rates) for side in sides.values()}) == 1


def test_verdicts_follow_from_intervals_and_published_claims() -> None:
    more, one = (PUBLISHED_PAIRS[name] for name in ("lstm", "6 layers"))

    def verdict(low: float, high: float, published_side: Published) -> str:
        return experiment.published_direction(low, high, published_side)

    assert verdict(1.1, 2.0, more) == "shows"
    assert verdict(0.9, 2.0, more) == "is not decided"
    assert verdict(0.5, 0.9, more) == "does not show: the other way"
    assert verdict(math.nan, math.nan, more) == "is not decided"
    assert verdict(1.1, 2.0, one) == "does not show: more is needed"
    assert verdict(0.5, 0.9, one) == "does not show: less is needed"
    assert verdict(0.9, 2.0, one) == "is not contradicted"
    assert verdict(math.nan, math.nan, one) == "is not decided"


def test_a_ratio_is_read_at_a_loss_with_an_interval() -> None:
    ratios = best_runs.ComputeRatio(
        loss=np.tile([2.5, 2.2, 1.9], (2, 2, 1)),
        ratio=np.tile([2.0, 3.0, 4.0], (2, 2, 1)),
        low=np.tile([1.0, 1.5, np.nan], (2, 2, 1)),
        high=np.array([2 * [[3.0, 4.0, np.nan]], 2 * [3 * [np.nan]]]),
        reason=np.full((2, 2), ""),
    )
    unused: Any = None
    sides = np.array(["transformer", "lstm"])
    result = rivals_runs.Result(sides, *5 * [unused], ratios)
    bounded, open_ended = experiment.read_ratios(result).rows()
    assert (bounded["loss"], bounded["ratio"]) == (2.2, 3.0)
    assert (bounded["low"], bounded["high"]) == (1.5, 4.0)
    assert (bounded["first_ratio"], bounded["last_ratio"]) == (2.0, 4.0)
    assert (open_ended["loss"], open_ended["ratio"]) == (1.9, 4.0)


def test_the_lead_is_computed_window_by_window() -> None:
    rng = np.random.default_rng(0)
    # Windows vary in difficulty, which both sides share.
    hard = np.cumsum(rng.normal(size=(1, 32, 64)), axis=2)
    lead = np.linspace(0, -0.1, 64) + 0.01 * rng.normal(size=(1, 32, 64))
    trained: Any = {
        (0, 9): SideResult([], [], hard + lead),
        (1, 9): SideResult([], [], hard),
    }
    places = rivals_runs._places(trained, 2, 64)
    assert places.lead[1] == pytest.approx(0.1 * 32 / 63, rel=0.05)
    assert places.lead_se[1] < 0.01 < places.gain_se[1]
    ends = places.lead[1] + np.array([-2, 2]) * places.lead_se[1]
    assert judge_direction(*ends, above=0) == "shows"


def test_a_side_that_cannot_reach_a_loss_has_no_verdict() -> None:
    nothing = np.full((2, 2, 40), np.nan)
    unused: Any = None
    result = rivals_runs.Result(
        np.array(["transformer", "lstm"]),
        unused,
        unused,
        rivals_runs.Differences.of([]),
        rivals_runs.PositionLosses(
            np.ones(1), np.ones((2, 1)), *np.full((4, 2), np.nan)
        ),
        unused,
        best_runs.ComputeRatio(*[nothing] * 4, np.full((2, 2), "")),
    )
    assert experiment.claims(result) == []
    assert experiment.metrics(result)["ratios"] == []
