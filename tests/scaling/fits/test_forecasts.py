"""Prediction intervals beyond the fitted compute include the errors of forecasts."""

import json
from typing import Any

import numpy as np
import pytest

from scaling.fits import (
    FitResult,
    bootstrap,
    fit,
    from_json,
    predict,
    score,
    to_json,
)
from scaling.laws import CHINCHILLA, find_law, simulate_isoflop_runs
from tests.support.refusals import refused

NUM_LARGE = 51
"""Held-out runs, those of the two largest budgets."""


def curved_runs(size: float) -> dict[str, Any]:
    """Returns 240 runs whose losses bend in ln(compute), by `size`."""
    runs = simulate_isoflop_runs(noise="normal")
    compute = np.log(runs["num_params"] * runs["num_tokens"])
    bend = size * ((compute - compute.mean()) / compute.std()) ** 2
    order = np.argsort(compute)
    return {
        "num_params": runs["num_params"][order],
        "num_tokens": runs["num_tokens"][order],
        "loss": (runs["loss"] * np.exp(bend))[order],
    }


def split(runs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    small = {name: column[:-NUM_LARGE] for name, column in runs.items()}
    return small, {name: column[-NUM_LARGE:] for name, column in runs.items()}


def covered(result: FitResult, runs: dict[str, Any]) -> float:
    forecast = predict(result, runs, "prediction")
    return float(
        np.mean((forecast.low <= runs["loss"]) & (runs["loss"] <= forecast.high))
    )


@pytest.mark.parametrize("num_resamples", [0, 100])
def test_intervals_cover_runs_beyond_a_law_that_lacks_a_curve(
    num_resamples: int,
) -> None:
    small, large = split(curved_runs(0.02))
    result = fit(CHINCHILLA, small)
    if num_resamples:
        result = bootstrap(result, small, num_resamples=num_resamples)
    narrow = result._replace(forecast_variance=(0.0, 0.0))
    assert covered(narrow, large) < 0.7
    assert covered(result, large) > 0.9
    if num_resamples:
        held_out = score(result, large).held_out
        assert held_out is not None
        assert (held_out.covered or 0.0) > 0.9
    # Fitted runs, and the law's own value, have the intervals that they had.
    for kind, runs in (("prediction", small), ("confidence", large)):
        wide = predict(result, runs, kind)
        np.testing.assert_array_equal(wide, predict(narrow, runs, kind))


def test_a_sound_law_has_little_wider_intervals_beyond_its_runs() -> None:
    ratios = []
    for seed in range(4):
        small, large = split(simulate_isoflop_runs(seed=seed, noise="normal"))
        result = fit(CHINCHILLA, small)
        forecast = predict(result, large, "prediction")
        narrow = result._replace(forecast_variance=(0.0, 0.0))
        base = predict(narrow, large, "prediction")
        ratios.append(
            np.median((forecast.high - forecast.low) / (base.high - base.low))
        )
    assert np.median(ratios) < 1.25


def test_an_outlying_run_does_not_hide_the_errors_of_forecasts() -> None:
    runs = split(curved_runs(0.02))[0]
    plain = sum(fit(CHINCHILLA, runs).forecast_variance)
    loss = runs["loss"].copy()
    loss[10] *= 2  # alone, its square exceeds those of all forecasts
    outlying = sum(fit(CHINCHILLA, runs | {"loss": loss}).forecast_variance)
    assert plain > 0
    assert plain / 2 < outlying < 2 * plain


def test_intervals_widen_with_the_distance_in_compute() -> None:
    result = fit(CHINCHILLA, split(curved_runs(0.02))[0])
    result = result._replace(forecast_variance=(0.01, 0.03))
    last = result.ranges["flops"][1]
    tokens = last * np.array([0.999999, 1.000001, np.e, np.e**4]) / 6e9
    runs = {"num_params": np.full(4, 1e9), "num_tokens": tokens}
    tiny = result._replace(covariance=0 * result.covariance, noise=np.zeros(9))
    forecast = predict(tiny, runs, "prediction")
    spread = np.log(forecast.high / forecast.loss)
    np.testing.assert_allclose(spread / spread[2], [0, 0.5, 1, 13**0.5 / 2], atol=1e-5)


def test_the_measured_variance_is_that_of_the_forecasts() -> None:
    # A power law fitted to a constant that jumps: every fit to the smaller runs misses
    # the larger ones by less than the jump, and residuals are smaller than the errors.
    flops = np.geomspace(1e18, 1e22, 40)
    rng = np.random.default_rng(0)
    loss = 20 * flops**-0.05 * np.exp(rng.normal(0, 0.01, 40))
    law = find_law("power")
    sound = fit(law, {"flops": flops, "loss": loss})
    bend = np.exp(0.02 * np.maximum(np.log(flops / 1e20), 0))
    bent = fit(law, {"flops": flops, "loss": loss * bend})
    assert sum(sound.forecast_variance) < np.mean(sound.noise**2)
    assert sum(bent.forecast_variance) > sum(sound.forecast_variance)
    assert min(*sound.forecast_variance, *bent.forecast_variance) >= 0
    few = {"flops": flops[::8], "loss": loss[::8]}
    assert fit(law, few).forecast_variance == (0.0, 0.0)


def test_the_warning_of_a_curve_has_the_measured_error_of_forecasts() -> None:
    (line,) = (x for x in fit(CHINCHILLA, curved_runs(0.02)).warnings if "a curve" in x)
    assert "fits to the smaller runs miss those of 2.7 times the compute by " in line
    # A curve across models of equal compute: forecasts are as good as the residuals.
    runs = curved_runs(0.0)
    ratio = np.log(runs["num_params"] / runs["num_tokens"])
    off = 0.02 * ((ratio - ratio.mean()) / ratio.std()) ** 3
    result = fit(CHINCHILLA, runs | {"loss": runs["loss"] * np.exp(off)})
    assert sum(result.forecast_variance) <= np.mean(result.noise**2)
    (line,) = (x for x in result.warnings if "a curve" in x)
    assert line.endswith("of their squares")


def test_files_have_the_variance_and_older_ones_need_not() -> None:
    document = to_json(fit(CHINCHILLA, curved_runs(0.02)))
    text = json.dumps(document)
    result = from_json(text)
    assert list(result.forecast_variance) == document["forecast_variance"]
    del document["forecast_variance"]
    assert from_json(document).forecast_variance == (0.0, 0.0)
    for wrong in ([-1.0, 0.0], [0.0], [0.0, None], 5, "5"):
        with refused("not a fit.json"):
            from_json({**document, "forecast_variance": wrong})
