"""Laws of whole curves: slow sums over steps, merged changes, published constants."""

import math
from collections.abc import Mapping

import numpy as np
import pytest

from scaling.laws import (
    CURVE_LAWS,
    MULTI_POWER_CONSTANTS,
    RateSchedule,
    curve_losses,
    merge_changes,
    rate_changes,
)
from scaling.logs import read_curves
from tests.support import traces
from tests.support.refusals import refused

COEFFICIENTS = {
    "fading-multi-power": dict(
        L0=2.7, A=0.45, alpha=0.54, B=900.0, C=1e-6, beta=0.2, gamma=2.4, delta=0.2
    ),
    "multi-power": MULTI_POWER_CONSTANTS["100M"],
    "annealed-area": {"L0": 2.7, "A": 0.58, "alpha": 0.47, "B": 460.0, "lambda": 0.995},
}
WARMUP = 200
PEAK = 3e-4


def make_rates(num_steps: int = 2000) -> np.ndarray:
    """Rates of every step from 0 on: warm-up, stable, fall, constant, fall."""
    step = np.arange(num_steps + 1)
    rate = PEAK * np.minimum(1.0, step / WARMUP)
    fall = np.clip((step - 800) / 600, 0.0, 1.0)
    again = np.clip((step - 1700) / 200, 0.0, 1.0)
    return rate * (1 - 0.8 * fall) * (1 - 0.5 * again)


def sum_over_steps(law: str, c: Mapping[str, float], rates: np.ndarray) -> float:
    """Returns the loss at the last step by the sums that the papers print."""
    area = float(rates.sum())
    last = len(rates) - 1
    term = 0.0
    for k in range(1, last + 1):
        drop = rates[k - 1] - rates[k]
        if law == "annealed-area":
            # S2 times 1 - lambda, term by term.
            ages = np.arange(last - k + 1)
            term += drop * (1 - c["lambda"]) * (c["lambda"] ** ages).sum()
        elif drop:
            x = c["C"] * rates[k] ** -c["gamma"] * rates[k:].sum()
            term += drop * (1 - (1 + x) ** -c["beta"])
    fade = area ** -c.get("delta", 0.0)
    return c["L0"] + c["A"] * area ** -c["alpha"] - c["B"] * fade * term


@pytest.mark.parametrize("law", CURVE_LAWS)
def test_losses_are_the_sums_over_steps_of_the_papers(law: str) -> None:
    rates = make_rates()
    step = np.arange(WARMUP, len(rates), 5)
    schedule = RateSchedule(step.astype(float), rates[step])
    losses = curve_losses(CURVE_LAWS[law], COEFFICIENTS[law], schedule)
    for i in (40, 100, 180, 260, 320, 360):
        slow = sum_over_steps(law, COEFFICIENTS[law], rates[: step[i] + 1])
        assert losses[i] == pytest.approx(slow, rel=6e-4)
    constant = RateSchedule(schedule.step, np.full(step.size, PEAK))
    effect = curve_losses(CURVE_LAWS[law], COEFFICIENTS[law], constant) - losses
    assert abs(effect[-1]) > 0.02  # far above the tolerance


@pytest.mark.parametrize("law", CURVE_LAWS)
def test_losses_equal_a_loop_over_rows_and_changes(law: str) -> None:
    rng = np.random.default_rng(0)
    step = np.cumsum(rng.uniform(20, 60, 40))
    rate = rng.uniform(1e-4, 1e-3, 40)
    c = COEFFICIENTS[law]
    losses = curve_losses(CURVE_LAWS[law], c, RateSchedule(step, rate))
    changes = rate_changes(RateSchedule(step, rate))
    assert changes.area[3] == pytest.approx(
        np.trapezoid([0, *rate[:4]], [0, *step[:4]]), rel=1e-12
    )
    for i in range(40):
        term = 0.0
        for j, drop in enumerate(changes.drop):
            if changes.change_step[j] > step[i]:
                continue
            if law == "annealed-area":
                share = 1 - c["lambda"] ** (step[i] - changes.change_step[j])
            else:
                x = changes.area[i] - changes.change_area[j]
                x *= c["C"] / changes.rate[j] ** c["gamma"]
                share = 1 - 1 / (1 + x) ** c["beta"]
            term += drop * share
        area = changes.area[i]
        slow = c["L0"] + c["A"] / area ** c["alpha"]
        slow -= c["B"] * term / area ** c.get("delta", 0.0)
        assert losses[i] == pytest.approx(slow, rel=1e-12)


def test_merged_changes_keep_the_sum_and_nearly_the_loss() -> None:
    rates = make_rates(8000)
    dense = np.arange(WARMUP, 8001).astype(float)
    merged = merge_changes(rate_changes(RateSchedule(dense, rates[WARMUP:])))
    assert merged.drop.size <= 120
    assert merged.drop.sum() == pytest.approx(-rates[-1], rel=1e-12)
    few = dense[::100]
    for name, law in CURVE_LAWS.items():
        c = COEFFICIENTS[name]
        fine = curve_losses(law, c, RateSchedule(dense, rates[WARMUP:]))[::100]
        coarse = curve_losses(law, c, RateSchedule(few, rates[WARMUP::100]))
        np.testing.assert_allclose(coarse[30:], fine[30:], rtol=1e-3)


def test_a_missing_coefficient_is_named() -> None:
    schedule = RateSchedule(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    law = CURVE_LAWS["multi-power"]
    with refused("multi-power needs a coefficient beta"):
        curve_losses(law, {x: 1.0 for x in law.coefficients if x != "beta"}, schedule)


@pytest.mark.parametrize(("size", "name"), [(25, "25M"), (100, "100M")])
def test_published_constants_predict_their_own_curves(size: float, name: str) -> None:
    log = read_curves(traces.find("losses2026/schedule_curves.csv"))
    errors = []
    for curve in log.curves:
        if curve.size == size:
            law = CURVE_LAWS["multi-power"]
            losses = curve_losses(law, MULTI_POWER_CONSTANTS[name], curve.schedule)
            errors.append(np.abs(np.log(losses / curve.loss)).mean())
    assert len(errors) == 9
    # Luo et al. print a mean relative error (PredE) of 0.11 % and 0.14 %.
    assert np.mean(errors) == pytest.approx(0.0012, abs=0.0005)
    assert math.isfinite(max(errors))
