"""Fits reach known optima, warn of doubtful data, and refuse invalid data."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scaling import fits, laws
from scaling.fits import (
    choose_pair,
    fitting,
    held_out_warnings,
    intervals,
    levenberg_marquardt,
    make_observations,
    prediction,
    profile_objective,
)
from scaling.fits.fitting import Objective, Restrictions
from scaling.fits.result import HeldOut
from scaling.laws import CONSTANTS, optimal_exponents, synthetic
from tests.support.refusals import refused

# Fits run for longer than they compile.
pytestmark = pytest.mark.usefixtures("full_optimization")

CHINCHILLA = laws.CHINCHILLA
HOFFMANN = CONSTANTS["hoffmann-tex"]


@pytest.fixture(scope="module")
def runs() -> dict:
    return synthetic.simulate_isoflop_runs()


@pytest.fixture(scope="module")
def result(runs: dict) -> fitting.FitResult:
    return resample(runs, 4000)


def resample(
    data: dict[str, Any], num_resamples: int, cluster: Any = None, **options: Any
) -> fitting.FitResult:
    """Fits the law with options, and then its resamples."""
    fit_result = fitting.fit(CHINCHILLA, data, cluster=cluster, **options)
    return fitting.bootstrap(
        fit_result, data, num_resamples=num_resamples, cluster=cluster
    )


def test_the_public_surface(runs: dict, result: fitting.FitResult) -> None:
    np.testing.assert_allclose(
        runs["loss"][:3], [2.85453134, 2.85944945, 3.0771333], rtol=1e-8
    )
    assert abs(result.objective - 0.00122400645673) < 1e-10
    coefficients = result.coefficients
    assert abs(coefficients["A"] / 431.35 - 1) < 1e-3
    assert abs(coefficients["B"] / 1368.7 - 1) < 1e-3
    for name, value in {"E": 1.79848, "alpha": 0.34180, "beta": 0.35544}.items():
        assert abs(coefficients[name] - value) < 1e-5
    assert set(result.statuses) == {"converged"}
    assert result.distinct_minima == 1
    assert not result.warnings
    assert not result.bounds_hit
    assert result.num_points == 240


def test_the_public_surface_near_least_absolute_deviations(runs: dict) -> None:
    near = fitting.fit(CHINCHILLA, runs, objective=Objective(delta=1e-6))
    assert abs(near.objective - 1.33680897724e-6) < 1e-15
    assert abs(near.coefficients["A"] / 418.76 - 1) < 1e-3
    assert abs(near.coefficients["E"] - 1.79535) < 1e-5
    at = fitting.fit(CHINCHILLA, runs, objective=Objective("lad"))
    assert at.objective == pytest.approx(np.abs(at.residuals).sum(), rel=1e-7)
    assert at.objective <= np.abs(near.residuals).sum()


def test_resamples_spread_as_published(result: fitting.FitResult) -> None:
    # Standard errors and 95 % interval of 4,000 resamples by another generator.
    spread = result.sampled().std(0)
    expected = np.array([81.3, 278, 0.0168, 0.0104, 0.0106])
    np.testing.assert_allclose(spread, expected, rtol=0.05)
    sampled = dict(zip(CHINCHILLA.coefficients, result.sampled().T, strict=True))
    a = optimal_exponents(CHINCHILLA, sampled).a
    np.testing.assert_allclose(
        np.quantile(a, [0.025, 0.975]), [0.489, 0.525], atol=2e-3
    )
    low, high = result.exponent_intervals["a"]
    assert low < 0.36 / 0.7 < high
    assert 0.489 < low < result.exponents["a"] < high < 0.525
    # Without resamples the curvature gives about the same.
    curved = np.sqrt(np.diagonal(result.covariance))
    np.testing.assert_allclose(curved, expected, rtol=0.25)


def test_intervals_of_predictions(runs: dict, result: fitting.FitResult) -> None:
    larger = {"num_params": [1e10, 2e10], "num_tokens": [2e11, 4e11]}
    narrow = fitting.predict(result, larger, "confidence")
    wide = fitting.predict(result, larger, "prediction")
    truth = CHINCHILLA.predict(jnp.array([*synthetic.COEFFICIENTS.values()]), larger)
    assert np.all((wide.low < narrow.low) & (narrow.low < truth))
    assert np.all((truth < narrow.high) & (narrow.high < wide.high))
    # About 90 % of the data are within the interval.
    inside = fitting.predict(result, runs, "prediction")
    share = np.mean((inside.low < runs["loss"]) & (runs["loss"] < inside.high))
    assert 0.86 < share < 0.95
    curved = fitting.predict(result._replace(samples=None), larger, "prediction")
    np.testing.assert_allclose(curved.low, wide.low, rtol=5e-3)
    np.testing.assert_allclose(curved.high, wide.high, rtol=5e-3)
    assert np.isnan(fitting.predict(result, larger).low).all()


def test_a_fit_survives_its_file(result: fitting.FitResult) -> None:
    text = json.dumps(fitting.to_json(result))
    again = fitting.from_json(text)
    assert again.samples is not None
    assert len(again.samples) == 1000
    np.testing.assert_array_equal(again.covariance, result.covariance)
    for name in ("coefficients", "intervals", "exponents", "warnings", "statuses"):
        assert getattr(again, name) == getattr(result, name)
    larger = {"num_params": [1e10], "num_tokens": [2e11]}
    before = fitting.predict(result, larger, "confidence")
    after = fitting.predict(again, larger, "confidence")
    assert after.loss == before.loss
    np.testing.assert_allclose(after.low, before.low, rtol=1e-3)
    for broken, reason in {
        "[]": "schema",
        '{"schema": 1}': "lacks 'law'",
        "{": "Expecting",
    }.items():
        with pytest.raises(ValueError, match=f"not a fit.json: .*{reason}"):
            fitting.from_json(broken)


def test_a_start_far_away_is_left(runs: dict) -> None:
    # First-order methods with default tolerances do not leave this start.
    law = CHINCHILLA
    refit = fitting.fit(law, runs, starts=[HOFFMANN])
    assert len(refit.statuses) == len(law.starts(0.0)) + 1
    assert abs(refit.objective - 0.00122400645673) < 1e-10


@pytest.mark.slow
def test_many_points_are_fitted_in_smaller_pieces(
    runs: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[float] = []
    subset = {name: column[:32] for name, column in runs.items()}
    fit_result = fitting.fit(CHINCHILLA, subset)

    def bootstrap() -> fitting.FitResult:
        return fitting.bootstrap(
            fit_result, subset, num_resamples=130, progress=reports.append
        )

    full_fit = bootstrap()
    assert reports == [130]
    monkeypatch.setattr(levenberg_marquardt, "_MAX_WEIGHTS", 64 * 32)
    parts = bootstrap()
    assert reports == [130, 64, 128, 130]
    assert full_fit.samples is not None
    assert parts.samples is not None
    # The same draws, in another batch.
    np.testing.assert_allclose(parts.samples, full_fit.samples, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["huber", "lad", "mse"])
def test_very_many_rows_are_fitted_whole_without_resamples(
    runs: dict,
    result: fitting.FitResult,
    loss: levenberg_marquardt.Loss,
    monkeypatch: Any,
) -> None:
    resampled_fit = result
    if loss != "huber":
        resampled_fit = resample(runs, 1000, objective=Objective(loss))
    monkeypatch.setattr(levenberg_marquardt, "MAX_EXACT_ROWS", 200)
    full_fit = resample(runs, 1000, objective=Objective(loss))
    assert fitting.describe_thinning(200) == ""
    assert "240 rows: laws are fitted to all of them," in fitting.describe_thinning(240)
    assert full_fit.objective == pytest.approx(resampled_fit.objective, abs=1e-10)
    assert full_fit.num_points == 240
    for name, value in full_fit.coefficients.items():
        assert value == pytest.approx(resampled_fit.coefficients[name], rel=1e-4)
        low, high = full_fit.intervals[name]
        # Of 240 rows the two differ by more than of thousands.
        assert 0.5 < (high - low) / np.diff(resampled_fit.intervals[name])[0] < 2
    assert full_fit.warnings == []


def test_rows_of_one_run_move_together_in_draws_too(runs: dict) -> None:
    copies = {name: np.tile(column, 9) for name, column in runs.items()}
    labels = np.tile(np.arange(240), 9)
    for cluster, share in ((labels, 1.0), (np.arange(len(labels)), 1 / 3)):
        spread = [
            _parameter_spread(runs, np.arange(240)),
            _parameter_spread(copies, cluster),
        ]
        np.testing.assert_allclose(spread[1] / spread[0], share, rtol=0.05)


def _parameter_spread(rows: dict, cluster: np.ndarray) -> np.ndarray:
    observations = make_observations(CHINCHILLA, rows, cluster=cluster)
    problem = levenberg_marquardt.FitProblem(CHINCHILLA, observations, Objective("mse"))
    truth = np.array([[synthetic.COEFFICIENTS[x] for x in CHINCHILLA.coefficients]])
    at = laws.coordinates(CHINCHILLA, truth, observations.centre)[0]
    return intervals.draw_normal(problem, at, 4000, np.random.default_rng(0)).std(0)


def test_predictions_of_many_points_come_in_pieces(
    result: fitting.FitResult, runs: dict, monkeypatch: Any
) -> None:
    full_predictions = fitting.predict(result, runs, "confidence")
    monkeypatch.setattr(prediction, "_MAX_NUMBERS", 7 * 4000)
    parts = fitting.predict(result, runs, "confidence")
    np.testing.assert_array_equal(parts, full_predictions)
    monkeypatch.setattr(prediction, "MAX_SCORED", 100)
    few = fitting.score(result, runs).held_out
    assert few is not None
    assert few.num_points == 240
    assert few.covered is not None
    assert few.covered == round(few.covered, 2) > 0.8  # of 100


def test_a_file_keeps_some_of_very_many_residuals(result: fitting.FitResult) -> None:
    long_fit = result._replace(residuals=np.arange(30_001.0), noise=np.arange(30_001.0))
    stored_fit = fitting.from_json(fitting.to_json(long_fit))
    for column in (stored_fit.residuals, stored_fit.noise):
        assert len(column) == 10_000
        np.testing.assert_array_equal(column[[0, -1]], [0, 30_000])
    assert stored_fit.num_points == result.num_points


def test_a_weight_of_zero_is_allowed() -> None:
    weights = np.arange(30.0) % 3
    observations = make_observations(CHINCHILLA, spoilt(), weights)
    np.testing.assert_array_equal(observations.weights, weights)
    for wrong in (-1.0, np.nan):
        weights[3] = wrong
        with pytest.raises(ValueError, match="weights must be finite, at least 0"):
            make_observations(CHINCHILLA, spoilt(), weights)


@pytest.mark.thorough
def test_weights_are_repetitions(runs: dict) -> None:
    subset = {name: column[:60] for name, column in runs.items()}
    weights = np.arange(60) % 3
    twice = {name: np.repeat(column, weights) for name, column in subset.items()}
    weighted = fitting.fit(CHINCHILLA, subset, weights=weights)
    repeated = fitting.fit(CHINCHILLA, twice, cluster=np.repeat(np.arange(60), weights))
    assert weighted.objective == pytest.approx(repeated.objective, rel=1e-9)
    for name, value in weighted.coefficients.items():
        assert value == pytest.approx(repeated.coefficients[name], rel=1e-5)


@pytest.mark.thorough
def test_rows_of_one_run_are_drawn_together(runs: dict) -> None:
    rows = {name: column[:48] for name, column in runs.items()}
    alone = resample(rows, 200)
    # Four near copies of every run: four times the rows, no more information.
    copies = {name: np.tile(column, 4) for name, column in rows.items()}
    copies["loss"] = copies["loss"] * np.repeat([1, 1 + 1e-9, 1 - 1e-9, 1 + 2e-9], 48)
    together = resample(copies, 200, cluster=np.tile(np.arange(48), 4))
    apart = resample(copies, 200)

    def width(fit_result: fitting.FitResult) -> float:
        low, high = fit_result.exponent_intervals["a"]
        return high - low

    assert width(together) == pytest.approx(width(alone), rel=0.02)
    assert width(apart) < 0.7 * width(alone)


def test_a_fit_leaves_float32_arrays_elsewhere(runs: dict) -> None:
    fitting.fit(CHINCHILLA, runs)
    assert jax.jit(lambda x: x * 2)(np.ones(3)).dtype == jnp.float32
    assert not jax.config.jax_enable_x64


@pytest.mark.thorough
def test_a_coefficient_that_is_given_is_not_fitted(
    runs: dict, result: fitting.FitResult
) -> None:
    fixed = {"E": 1.7, "alpha": 0.34}
    held = resample(runs, 100, restrictions=Restrictions(fixed))
    assert {name: held.coefficients[name] for name in fixed} == fixed
    assert held.intervals["E"] == (1.7, 1.7)
    assert (held.num_free, held.status, held.bounds_hit) == (3, "converged", [])
    np.testing.assert_allclose(held.sampled()[:, [2, 3]].std(0), 0, atol=1e-12)
    assert (held.covariance[2] == 0).all()
    assert held.covariance[1, 1] > 0
    # The objective over the plane of the two, found another way.
    at = profile_objective(
        result, runs, ("alpha", "E"), np.array([0.34]), np.array([1.7])
    )
    np.testing.assert_allclose(held.objective, at[0, 0], rtol=1e-6)
    # Fixing a coefficient narrows the other intervals; least squares gain a degree of
    # freedom.
    squares = Objective("mse")
    free = fitting.fit(CHINCHILLA, runs, objective=squares)
    floor = Restrictions({"E": 1.8})
    fixed_fit = fitting.fit(CHINCHILLA, runs, objective=squares, restrictions=floor)
    assert fixed_fit.noise.std() < free.noise.std()
    for name in ("A", "B", "alpha", "beta"):
        assert np.ptp(fixed_fit.intervals[name]) < np.ptp(free.intervals[name])
    stored_fit = fitting.from_json(json.dumps(fitting.to_json(held)))
    assert stored_fit.fixed == fixed
    assert choose_pair(stored_fit) is None
    lower = fitting.predict(stored_fit, runs, "confidence").low
    assert (lower < fitting.predict(stored_fit, runs)[0]).all()


def test_bounds_are_kept_and_reported(runs: dict, result: fitting.FitResult) -> None:
    bounded = Restrictions(bounds={"E": (1.9, np.inf)})
    held = fitting.fit(CHINCHILLA, runs, restrictions=bounded)
    assert held.coefficients["E"] == pytest.approx(1.9, rel=1e-12)
    assert (held.status, held.bounds_hit) == ("bound_hit", ["E"])
    assert "E=1.9 is at the bound that was set" in held.warnings[0]
    stored_fit = fitting.from_json(json.dumps(fitting.to_json(held)))
    assert stored_fit.bounds == {"E": (1.9, np.inf)}
    bounded = Restrictions(bounds={"alpha": (0.1, 0.9)})
    wide = fitting.fit(CHINCHILLA, runs, restrictions=bounded)
    assert wide.coefficients == pytest.approx(result.coefficients, rel=1e-7)
    assert not wide.warnings


@pytest.mark.slow
def test_a_size_is_given_in_natural_units(
    runs: dict, result: fitting.FitResult
) -> None:
    # Its coordinate contains the exponent: fitting must not confuse the two.
    for name in ("A", "B"):
        fixed = {name: result.coefficients[name]}
        held = fitting.fit(CHINCHILLA, runs, restrictions=Restrictions(fixed))
        assert held.objective == pytest.approx(result.objective, rel=1e-10)
        assert held.coefficients == pytest.approx(result.coefficients, rel=1e-6)
    away = resample(runs, 100, restrictions=Restrictions({"A": 500.0}))
    assert away.intervals["A"] == (500.0, 500.0)
    np.testing.assert_allclose(away.sampled()[:, 0], 500, rtol=1e-9)
    for share in (0.999, 1.001):
        other = {"A": 500.0, "alpha": share * away.coefficients["alpha"]}
        further = fitting.fit(CHINCHILLA, runs, restrictions=Restrictions(other))
        assert further.objective > away.objective
    again = fitting.predict(fitting.from_json(fitting.to_json(away)), runs)[0]
    np.testing.assert_allclose(np.log(again / runs["loss"]), away.residuals, atol=1e-9)
    bounded = Restrictions(bounds={"A": (500.0, 1000.0)})
    bound = fitting.fit(CHINCHILLA, runs, restrictions=bounded)
    assert bound.coefficients == pytest.approx(away.coefficients, rel=1e-6)
    assert bound.bounds_hit == ["A"]


def test_held_out_runs_are_scored(runs: dict) -> None:
    flops = 6 * runs["num_params"] * runs["num_tokens"]
    is_large = flops > flops.max() / 10
    small = {name: column[~is_large] for name, column in runs.items()}
    large = {name: column[is_large] for name, column in runs.items()}
    fit_result = fitting.score(resample(small, 200), large)
    held_out = fit_result.held_out
    assert held_out is not None
    assert fit_result.num_points + held_out.num_points == 240
    assert held_out.num_points == np.sum(flops > flops.max() / 10)
    assert fit_result.ranges["flops"][1] <= flops.max() / 10
    assert held_out.mean_error < 0.01
    assert held_out.covered is not None
    assert held_out.covered > 0.8
    with refused("data has no row: at least one run must be scored"):
        fitting.score(fit_result, {name: column[:0] for name, column in runs.items()})
    # Other intervals need another score.
    again = fitting.bootstrap(fit_result, small, num_resamples=2)
    assert again.held_out is None


def spoilt(**columns: object) -> dict:
    good = {
        name: column[:30].copy()
        for name, column in synthetic.simulate_isoflop_runs().items()
    }
    return good | columns


def negative() -> np.ndarray:
    column = spoilt()["loss"]
    column[7] = -1
    return column


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({x: y[:4] for x, y in spoilt().items()}, "4 points are too few for the 5"),
        (spoilt(loss=negative()), "row 7: loss=-1.0 must be positive and finite"),
        (spoilt(num_tokens=np.full(30, np.nan)), "row 0: num_tokens=nan must be"),
        (spoilt(num_params=np.full(30, 1e9)), "num_params is the same in all 30 rows"),
        (
            spoilt(num_params=1e9 * (1 + 1e-7 * np.arange(30))),
            "num_params is the same in all 30 rows, to within 0.1%: nothing to fit",
        ),
        ({x: np.tile(y, 2) for x, y in spoilt().items()}, "rows 0 and 30 are the same"),
        (spoilt(loss=np.ones(29)), "columns of different lengths: .* loss 29"),
        (spoilt(loss=["a"] * 30), "loss is not numeric"),
        (
            {"num_params": [1.0], "loss": [1.0]},
            "chinchilla needs a column num_tokens; there is num_params, loss",
        ),
    ],
)
def test_bad_data_is_refused(data: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fitting.fit(CHINCHILLA, data)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"level": 1.0}, "level=1.0 must be"),
        ({"weights": np.zeros(30)}, "not all 0"),
        ({"cluster": np.zeros(9)}, "9 cluster labels for 30 rows"),
        ({"starts": [{"A": 1.0}]}, "a start needs A, B, E, alpha, beta"),
        ({"objective": "mse"}, "objective='mse' must be a Objective"),
        ({"restrictions": {"E": 1.0}}, "must be a Restrictions"),
    ],
)
def test_bad_options_are_refused(options: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fitting.fit(CHINCHILLA, spoilt(), **options)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fixed": {"gamma": 1.0}}, "gamma=1: chinchilla has no such coefficient; it"),
        ({"fixed": {"E": 0.0}}, "E=0: must be above 0"),
        ({"fixed": {"E": np.nan}}, "E=nan: must be finite"),
        ({"fixed": {"alpha": 3.0}}, r"alpha=3: must be in \[0.001, 2\]"),
        ({"fixed": dict.fromkeys(CHINCHILLA.coefficients, 1.0)}, "nothing to fit"),
        ({"fixed": None}, "fixed=None must be a Mapping"),
        ({"bounds": {"E": (2.0, 1.0)}}, r"E in \[2, 1\]: the first must be below"),
        ({"bounds": {"E": (-1.0, 1.0)}}, r"E in \[-1, 1\]: must be above 0"),
        ({"bounds": {"beta": (0.1, 9.0)}}, r"beta in \[0.1, 9\]: must be in \[0.001"),
        ({"fixed": {"E": 1.0}, "bounds": {"E": (1.0, 2.0)}}, "it is fixed"),
    ],
)
def test_bad_restrictions_are_refused(fields: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fitting.fit(CHINCHILLA, spoilt(), restrictions=Restrictions(**fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"delta": 0.0}, "delta=0.0 must be positive, at least 1e-12; see loss='lad'"),
        ({"delta": np.inf}, r"delta=inf must be in \(-inf, inf\)"),
        ({"delta": "5"}, "delta='5' must be a number"),
        ({"loss": "l2"}, "loss='l2' must be 'huber', 'lad' or 'mse'"),
        ({"space": None}, "space=None must be 'log' or 'linear'"),
    ],
)
def test_bad_objectives_are_refused(fields: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Objective(**fields)


def test_objectives_and_restrictions_do_not_change() -> None:
    assert Objective(delta=1).delta == 1.0
    assert hash(Objective("mse")) == hash(Objective("mse"))
    fixed = {"E": 1.8}
    restrictions = Restrictions(fixed)
    fixed["E"] = 2.0
    assert restrictions == Restrictions({"E": 1.8})
    with pytest.raises(TypeError):
        restrictions.fixed["E"] = 2.0  # ty: ignore[invalid-assignment]


def test_resamples_of_other_data_are_refused(runs: dict) -> None:
    subset = {name: column[:30] for name, column in runs.items()}
    fit_result = fitting.fit(CHINCHILLA, subset)
    for other in (runs, {name: column[30:60] for name, column in runs.items()}):
        with refused("data and weights must be those of the fit"):
            fitting.bootstrap(fit_result, other, num_resamples=2)
    with refused("data and weights must be those of the fit"):
        fitting.bootstrap(
            fit_result, subset, num_resamples=2, weights=1 + np.arange(30) % 2
        )
    with refused("num_resamples=1 must be at least 2"):
        fitting.bootstrap(fit_result, subset, num_resamples=1)


def test_a_fit_from_a_file_is_resampled(runs: dict) -> None:
    subset = {name: column[:60] for name, column in runs.items()}
    size = Restrictions({"A": 500.0})
    fit_result = fitting.fit(CHINCHILLA, subset, restrictions=size)
    again = fitting.from_json(json.dumps(fitting.to_json(fit_result)))
    assert again.optimum is None
    first, second = (
        fitting.bootstrap(x, subset, num_resamples=20, seed=3)
        for x in (fit_result, again)
    )
    np.testing.assert_allclose(first.sampled(), second.sampled(), rtol=1e-9)
    assert first.intervals["A"] == second.intervals["A"] == (500.0, 500.0)
    # A law that is not published is passed again.
    own_law = dataclasses.replace(CHINCHILLA, name="unpublished")
    fit_result = fitting.fit(own_law, subset, restrictions=size)
    with pytest.raises(ValueError, match="no law 'unpublished'"):
        fitting.bootstrap(fit_result, subset, num_resamples=20)
    third = fitting.bootstrap(fit_result, subset, num_resamples=20, seed=3, law=own_law)
    assert third.samples is not None
    np.testing.assert_array_equal(third.samples, first.samples)


@pytest.mark.parametrize(
    ("former", "call"),
    [
        (
            {"bootstrap": 0},
            "fit(bootstrap=) is now fits.fit(law, runs, weights=weights)",
        ),
        (
            {"loss": "mse", "fixed": {"E": 1.8}, "bounds": None},
            "fit(loss=, fixed=, bounds=) is now fits.fit(law, runs, "
            "weights=weights, objective=fits.Objective(loss='mse'), "
            "restrictions=fits.Restrictions(fixed={'E': 1.8}))",
        ),
        (
            {"held_out": np.arange(60) > 49, "bootstrap": 20, "seed": 3},
            "fit(held_out=, bootstrap=, seed=) is now fits.score(fits.bootstrap("
            "fits.fit(law, runs, weights=weights), runs, num_resamples=20, seed=3, "
            "weights=weights), held_out_runs)",
        ),
    ],
)
def test_former_keywords_are_translated(runs: dict, former: dict, call: str) -> None:
    subset = {name: column[:60] for name, column in runs.items()}
    weights = np.linspace(1.0, 2.0, 60)
    with pytest.warns(DeprecationWarning, match="is now") as messages:
        fit_result = fitting.fit(CHINCHILLA, subset, weights=weights, **former)
    [message] = messages
    assert str(message.message) == call
    assert message.filename == __file__
    mask = former.get("held_out", np.zeros(60, bool))
    small, large = (
        {name: column[rows] for name, column in subset.items()}
        for rows in (~mask, mask)
    )
    weights = weights[~mask]
    new = fitting.fit(
        CHINCHILLA,
        small,
        objective=Objective(former.get("loss", "huber")),
        restrictions=Restrictions(former.get("fixed", {})),
        weights=weights,
    )
    if former.get("bootstrap"):
        new = fitting.bootstrap(new, small, num_resamples=20, seed=3, weights=weights)
    if mask.any():
        new = fitting.score(new, large)
    assert json.dumps(fitting.to_json(fit_result)) == json.dumps(fitting.to_json(new))


def test_a_former_name_of_score(runs: dict, result: fitting.FitResult) -> None:
    with pytest.warns(DeprecationWarning, match=r"is now called fits\.score"):
        fit_result = fits.score_held_out(result, runs)
    assert fit_result.held_out == fitting.score(result, runs).held_out


def test_former_keywords_are_checked(runs: dict) -> None:
    for mask, line in {
        "flops > 1e9": "held_out must be a mask of rows, such as log.select(rule)",
        (False,) * 240: "held_out has no row: at least one run must be scored",
    }.items():
        options: dict[str, Any] = {"held_out": mask}
        with refused(line):
            fitting.fit(CHINCHILLA, runs, **options)
    options = {"bootstraps": 20}
    with pytest.raises(TypeError, match="unexpected keyword argument 'bootstraps'"):
        fitting.fit(CHINCHILLA, runs, **options)
    options = {"loss": "mse", "objective": Objective("mse")}
    with pytest.raises(TypeError, match=r"fit\(\) got both objective= and loss"):
        fitting.fit(CHINCHILLA, runs, **options)


def nearly_collinear(seed: int) -> dict[str, np.ndarray]:
    """Runs whose tokens are, or nearly are, 20 times their parameters."""
    rng = np.random.default_rng(1000 + seed)
    n = int(rng.choice([8, 8, 10, 12, 16, 24]))
    num_params = 10 ** np.sort(rng.uniform(6.5, 9.5, n))
    jitter = rng.choice([0, 0, 0.02, 0.1, 0.3])
    num_tokens = 20 * num_params * np.exp(jitter * rng.standard_normal(n))
    noise = rng.choice([0.002, 0.01, 0.03, 0.06])
    loss = 1.69 + 406.4 / num_params**0.34 + 410.7 / num_tokens**0.28
    loss *= np.exp(noise * rng.standard_normal(n))
    return {"num_params": num_params, "num_tokens": num_tokens, "loss": loss}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "objective"),
    [
        (15, 1.0634773e-5),
        (13, 4.2365113e-5),
        (14, 1.0962686e-4),
        (23, 2.6524317e-5),
    ],
)
def test_the_best_optimum_of_a_collinear_set_is_found(
    seed: int, objective: float
) -> None:
    fit_result = fitting.fit(CHINCHILLA, nearly_collinear(seed))
    assert fit_result.objective == pytest.approx(objective, rel=2e-6)
    assert len(fit_result.statuses) > 27


@pytest.mark.slow
def test_no_optimum_of_collinear_sets_is_missed() -> None:
    """Compares with 1,024 other starts, of which the best 128 are run to the end."""
    for seed in range(24, 29):
        data = nearly_collinear(seed)
        fit_result = fitting.fit(CHINCHILLA, data)
        observations = make_observations(CHINCHILLA, data)
        problem = levenberg_marquardt.FitProblem(CHINCHILLA, observations)
        weights = np.tile(problem.runs.weights, (1024, 1))
        starts = np.random.default_rng(seed).uniform(*problem.box, (1024, 5))
        ends = levenberg_marquardt.solve_weightings(problem, weights, starts)
        for _ in range(4):
            best = ends.coordinates[np.argsort(ends.objective)[:128]]
            ends = levenberg_marquardt.solve_weightings(
                problem, weights[:128], best, tolerance=1e-16
            )
        assert fit_result.objective <= ends.objective.min() * (1 + 1e-8), seed


def sixteen_runs(noise: float = 0.0) -> dict[str, np.ndarray]:
    """A grid of four sizes and four numbers of tokens."""
    n, d = map(np.ravel, np.meshgrid([1e7, 3e7, 1e8, 3e8], [2e8, 6e8, 2e9, 6e9]))
    loss = 1.69 + 406.4 / n**0.34 + 410.7 / d**0.28
    loss *= np.exp(noise * np.random.default_rng(0).standard_normal(16))
    return {"num_params": n, "num_tokens": d, "loss": loss}


@pytest.mark.thorough
def test_a_target_that_rises_is_doubted_once() -> None:
    data = sixteen_runs(0.001)
    accuracy = data | {"loss": 0.9 - data["loss"] / 10}
    warning = "loss rises with num_params and num_tokens, and chinchilla only falls"
    fit_result = fitting.fit(CHINCHILLA, accuracy)
    (warning_line,) = [x for x in fit_result.warnings if "points are few" not in x]
    assert warning_line.startswith(warning)
    # Held-out runs do not repeat the warning.
    score = HeldOut(40, 0.1, 0.2, 0.1, 0.1)
    assert not held_out_warnings(score, fit_result.warnings)
    assert held_out_warnings(score)
    assert not fitting.fit(CHINCHILLA, data).warnings


def test_a_floor_above_every_loss_is_refused() -> None:
    data = sixteen_runs()
    largest_loss = f"{data['loss'].max():.6g}"
    line = f"E=6 must be in (0, {largest_loss}): it is above every loss"
    with refused(line):
        fitting.fit(CHINCHILLA, data, restrictions=Restrictions({"E": 6.0}))
    with refused(line):
        bounded = Restrictions(bounds={"E": (6.0, 7.0)})
        fitting.fit(CHINCHILLA, data, restrictions=bounded)
    floor = Restrictions({"E": 3.5})
    fit_result = fitting.fit(CHINCHILLA, data, restrictions=floor)
    num_below = int((data["loss"] < 3.5).sum())
    assert (
        f"E=3.5 is given, and above {num_below} of 16 loss values"
        in fit_result.warnings
    )


def test_coefficients_at_walls_share_a_line() -> None:
    bounds = {"alpha": (0.5, 0.6), "beta": (0.5, 0.6)}
    restrictions = Restrictions(bounds=bounds)
    fit_result = fitting.fit(CHINCHILLA, sixteen_runs(), restrictions=restrictions)
    assert fit_result.bounds_hit == ["alpha", "beta"]
    [line] = [x for x in fit_result.warnings if "at the bound" in x]
    assert line == (
        "alpha=0.5, beta=0.5 are at the bound that was set: the data asks for another "
        "value"
    )
