"""Fits of laws of whole curves: exact recovery, hidden curves, bands, baselines."""

import numpy as np
import pytest

from scaling.curves import (
    CurveFit,
    constant_baseline,
    fit_curves,
    predict_curve,
    ratio_baseline,
)
from scaling.laws import CURVE_LAWS, RateSchedule, curve_losses
from scaling.logs import TrainingCurve, read_curves
from tests.support import traces
from tests.support.refusals import refused

STEP = np.linspace(500, 10000, 40)
SHARE = (STEP - 500) / 9500
RATES = {
    "constant": np.full(40, 3e-4),
    "cosine": 3e-5 + 2.7e-4 * (1 + np.cos(np.pi * SHARE)) / 2,
    "wsd": 3e-4 * np.interp(SHARE, [0, 0.8, 1], [1, 1, 0.1]),
    "two-stage": np.where(SHARE < 0.5, 3e-4, 9e-5),
}
AREA = CURVE_LAWS["annealed-area"]
SHAPES = {
    "annealed-area": {"lambda": 0.999},
    "fading-multi-power": {"C": 1e-6, "beta": 0.3, "gamma": 2.4, "delta": 0.2},
}
OWN = {
    25.0: {"L0": 3.1, "A": 0.5, "alpha": 0.5, "B": 400.0},
    100.0: {"L0": 2.8, "A": 0.55, "alpha": 0.47, "B": 500.0},
}


def make_curves(
    law: str, sizes: tuple[float, ...], noise: float = 0.0
) -> list[TrainingCurve]:
    rng = np.random.default_rng(0)
    curves = []
    for size in sizes:
        for name, rate in RATES.items():
            schedule = RateSchedule(STEP, rate)
            loss = curve_losses(CURVE_LAWS[law], OWN[size] | SHAPES[law], schedule)
            # One offset of the whole curve: its rows are not independent.
            loss = loss * np.exp(noise * rng.normal())
            curves.append(TrainingCurve(size, name, schedule, loss))
    return curves


@pytest.fixture(scope="module")
def fit() -> CurveFit:
    return fit_curves(AREA, make_curves("annealed-area", (25.0,)))


def test_exact_curves_return_their_coefficients(fit: CurveFit) -> None:
    truth = OWN[25.0] | SHAPES["annealed-area"]
    for name, value in truth.items():
        assert fit.coefficients[25.0][name] == pytest.approx(value, rel=1e-3)
        low, high = fit.spread[25.0][name]
        assert low <= high
    assert fit.objective < 1e-9
    assert fit.warnings == []
    # All four curves are hidden once, since the size has at least three.
    assert {*fit.hidden_errors[25.0]} == {f"{name} at 25" for name in RATES}
    assert max(map(abs, fit.hidden_errors[25.0].values())) < 1e-4


def test_a_band_is_students_t_of_one_error_per_hidden_curve(fit: CurveFit) -> None:
    errors = [0.001, 0.002, 0.0, 0.002]
    wide = fit._replace(errors={25.0: errors})
    prediction = predict_curve(wide, 25.0, RateSchedule(STEP, RATES["wsd"]), level=0.9)
    # 2.1318 is the 95 % quantile of t with 4 degrees of freedom; rms is 0.0015.
    width = 2.13185 * 0.0015
    np.testing.assert_allclose(np.log(prediction.high / prediction.loss), width, 1e-4)
    np.testing.assert_allclose(np.log(prediction.loss / prediction.low), width, 1e-4)
    with refused("size=7 must be one of the fitted sizes 25"):
        predict_curve(fit, 7.0, RateSchedule(STEP, RATES["wsd"]))


def test_curves_that_cannot_be_fitted_are_refused() -> None:
    curves = make_curves("annealed-area", (25.0,))
    with refused("no curve has a falling learning rate"):
        fit_curves(AREA, curves[:1])
    with refused("two curves are cosine at 25: names must differ at one size"):
        fit_curves(AREA, [*curves, curves[1]])


def test_baselines_are_exact_where_ratios_are_powers_of_the_size() -> None:
    curves = []
    for size in (25.0, 100.0, 400.0):
        for name, rate in RATES.items():
            ratio = np.exp((rate / 3e-4 - 1) * 0.01 * np.log(size))
            loss = (2 + 10 / np.sqrt(STEP)) * size**-0.1 * ratio
            curves.append(TrainingCurve(size, name, RateSchedule(STEP, rate), loss))
    target = next(x for x in curves if x.size == 400 and x.name == "wsd")
    known = [x for x in curves if x.size < 400 or x.name == "constant"]
    np.testing.assert_allclose(ratio_baseline(known, target), target.loss, rtol=1e-12)
    level = constant_baseline(known, 400.0, np.array([STEP[3], 10100.0, 20000.0]))
    constant = (2 + 10 / np.sqrt(STEP)) * 400**-0.1
    np.testing.assert_allclose(level[:2], constant[[3, -1]], rtol=1e-12)
    assert np.isnan(level[2])
    assert np.isnan(ratio_baseline([], target)).all()


@pytest.mark.thorough
def test_sizes_share_the_response_and_borrow_b() -> None:
    law = CURVE_LAWS["fading-multi-power"]
    curves = make_curves("fading-multi-power", (25.0, 100.0))
    truth = OWN[100.0] | SHAPES["fading-multi-power"]
    few = [x for x in curves if x.size == 25 or x.name in ("constant", "cosine")]
    fit = fit_curves(law, few)
    for curve in curves:
        prediction = predict_curve(fit, curve.size, curve.schedule)
        np.testing.assert_allclose(prediction.loss, curve.loss, rtol=2e-4)
    assert fit.coefficients[100.0]["delta"] == pytest.approx(truth["delta"], abs=0.02)
    # The other size is rehearsed with the schedules of this one alone.
    assert {*fit.hidden_errors[100.0]} == {"wsd at 25", "two-stage at 25"}
    constant = [x for x in curves if x.size == 25 or x.name == "constant"]
    fit = fit_curves(law, constant)
    assert any("B follows from the other sizes" in line for line in fit.warnings)
    assert fit.coefficients[100.0]["B"] == pytest.approx(
        fit.coefficients[25.0]["B"], rel=1e-6
    )


@pytest.mark.slow
def test_public_curves_of_one_size_predict_those_of_another() -> None:
    log = read_curves(traces.find("losses2026/schedule_curves.csv"))
    own = ("constant_72000", "cosine_24000")
    small = [x for x in log.curves if x.size == 25]
    fitted = [x for x in log.curves if x.size == 100]
    fitted += [x for x in small if x.name in own]
    hidden = [x for x in small if x.is_annealed and x.name not in own]
    assert len(hidden) == 6
    errors = {}
    for name in ("fading-multi-power", "annealed-area"):
        fit = fit_curves(CURVE_LAWS[name], fitted)
        losses = [predict_curve(fit, x.size, x.schedule).loss for x in hidden]
        errors[name] = [
            abs(loss[-5:].mean() / x.end_loss - 1)
            for loss, x in zip(losses, hidden, strict=True)
        ]
    ratios = [ratio_baseline(fitted, x) for x in hidden]
    ratio_errors = [
        abs(loss[-5:].mean() / x.end_loss - 1)
        for loss, x in zip(ratios, hidden, strict=True)
    ]
    assert np.mean(errors["fading-multi-power"]) < 6e-4
    assert np.mean(errors["annealed-area"]) < 4e-3
    assert np.mean(errors["fading-multi-power"]) < np.mean(ratio_errors) / 5
