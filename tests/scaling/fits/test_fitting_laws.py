"""Every law is recovered from its own points; doubtful fits give warnings."""

from collections.abc import Callable

import numpy as np
import pytest

from scaling.fits import (
    bootstrap,
    goodness,
    held_out_warnings,
)
from scaling.fits import fit as fit_law
from scaling.fits.fitting import HeldOut, compare
from scaling.laws import (
    CHINCHILLA,
    ILL_POSED,
    LAWS,
    compute_optimum,
    find_law,
    simulate_isoflop_runs,
    simulate_runs,
)
from tests.support.law_formulas import COLUMNS, EXAMPLES, plainly

# Laws of the quick tests. The other laws compile as long and are slow tests.
QUICK = ("chinchilla", "kaplan")
# Their coefficients may be exchanged for one another, beyond rounding.
FREE = (
    *("broken", "clark", "krajewski", "data-constrained", "rosenfeld-error"),
    *("overfitting", "joint-experts"),
)


@pytest.mark.parametrize(
    "name",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in EXAMPLES],
)
def test_points_on_a_law(name: str) -> None:
    law = LAWS[name]
    truth = EXAMPLES[name]
    data = COLUMNS | {law.target: plainly(name, truth, COLUMNS)}
    fit_result = fit_law(law, data)
    assert np.abs(fit_result.residuals).max() < 1e-8
    assert fit_result.status == "converged"
    if name not in FREE:
        np.testing.assert_allclose(
            [*fit_result.coefficients.values()], truth, rtol=1e-6
        )


@pytest.mark.parametrize("kind", ILL_POSED)
def test_ill_posed_runs_are_doubted(kind: str) -> None:
    # `fit_coverage` counts shares over many surfaces.
    data, _ = simulate_runs(kind, 32, seed=3)
    fit_result = bootstrap(fit_law(CHINCHILLA, data), data, num_resamples=100)
    assert fit_result.warnings


@pytest.mark.thorough
def test_texts_of_warnings() -> None:
    kind = "collinear: D = 20 N"
    data, _ = simulate_runs(kind, 32, seed=0)
    fit_result = fit_law(CHINCHILLA, data)
    assert fit_result.warnings[0] == (
        "num_tokens follows from num_params in these runs, so their terms cannot be "
        "separated: vary them separately"
    )
    assert fit_result.condition_number > 1e6
    (flat,) = fit_result.flat_directions
    assert sum(x * x for x in flat.values()) == pytest.approx(1)
    # A free coefficient has no narrow interval.
    low, high = fit_result.intervals["A"]
    assert high > 1000 * low
    data, _ = simulate_runs("one wild outlier", 32, seed=0)
    (warning,) = fit_law(CHINCHILLA, data).warnings
    assert warning == "1 of 32 point is far off the law: outliers, or another law"
    data, _ = simulate_runs("floor near zero", 32, seed=0)
    fit_result = bootstrap(fit_law(CHINCHILLA, data), data, num_resamples=100)
    assert any(warning.startswith("E") for warning in fit_result.warnings)


def test_a_term_that_is_not_there_hits_its_bound() -> None:
    data = dict(simulate_isoflop_runs(60, noise="normal"))
    data["loss"] = 1.8 + 1500 / data["num_tokens"] ** 0.36
    fit_result = fit_law(CHINCHILLA, data)
    assert set(fit_result.bounds_hit) & {"A", "alpha"}
    assert fit_result.status == "bound_hit"
    assert any("does not identify" in warning for warning in fit_result.warnings)


@pytest.mark.thorough
def test_compute_to_equal_loss() -> None:
    better = simulate_isoflop_runs(100, seed=0, noise="normal")
    worse = {x: y.copy() for x, y in simulate_isoflop_runs(100, seed=1).items()}
    # The second needs three times the tokens for every loss.
    worse["num_tokens"] *= 3
    fits = [
        bootstrap(fit_law(CHINCHILLA, x), x, num_resamples=100) for x in (better, worse)
    ]
    comparison = compare(*fits, level=0.98)
    np.testing.assert_allclose(comparison.ratio, 3, rtol=0.1)
    assert np.all(
        (comparison.low < comparison.ratio) & (comparison.ratio < comparison.high)
    )
    assert np.mean((comparison.low < 3) & (comparison.high > 3)) > 0.9
    again = compare(fits[1], fits[0])
    np.testing.assert_allclose(again.ratio, 1 / comparison.ratio, rtol=1e-9)
    # Only for losses that both reached.
    for fit in fits:
        ends = [
            compute_optimum(CHINCHILLA, fit.coefficients, x).loss
            for x in fit.ranges["flops"]
        ]
        assert np.all(min(ends) * (1 - 1e-9) <= comparison.loss)
        assert np.all(comparison.loss <= max(ends) * (1 + 1e-9))
    far = {x: y.copy() for x, y in worse.items()}
    far["loss"] = far["loss"] + 10
    with pytest.raises(ValueError, match="no loss was reached by both"):
        compare(fits[0], fit_law(CHINCHILLA, far))


def test_compute_to_equal_loss_of_curves() -> None:
    flops = np.geomspace(1e17, 1e21, 12)
    first = {"flops": flops, "loss": 20 * flops**-0.05}
    second = {"flops": 4 * flops, "loss": 20 * flops**-0.05}
    law = find_law("power")
    a, b = (fit_law(law, x) for x in (first, second))
    comparison = compare(a, b)
    np.testing.assert_allclose(comparison.ratio, 4, rtol=1e-6)
    assert np.isnan(comparison.low).all()
    with pytest.raises(ValueError, match="flops of one fit cannot be compared with"):
        compare(a, fit_law(law.over("steps"), {**first, "steps": flops}))
    neither = a._replace(law="kaplan-steps", inputs=("num_params", "steps"))
    with pytest.raises(ValueError, match="neither a compute optimum nor a single"):
        compare(a, neither)


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (lambda x, y: 0 * x, ""),
        (lambda x, y: 0.01 * (x**2 + x**3), "residuals follow a curve that the law"),
        (lambda x, y: 0.005 * (y - x) ** 2, "residuals follow a curve that the law"),
        (lambda x, y: 0.8 * (np.arange(len(x)) % 2), "the law misses one run in ten"),
    ],
)
def test_misfit_gives_a_warning(change: Callable[..., np.ndarray], doubt: str) -> None:
    runs = simulate_isoflop_runs(60, noise="normal")
    x, y = (np.log10(runs[name]) for name in ("num_params", "num_tokens"))
    off = change((x - x.mean()) / x.std(), (y - y.mean()) / y.std())
    result = fit_law(CHINCHILLA, runs | {"loss": runs["loss"] * np.exp(off)})
    warnings = [line for line in result.warnings if "the law" in line]
    assert [line[: len(doubt)] for line in warnings[:1]] == ([doubt] if doubt else [])


def test_residuals_are_measured() -> None:
    sizes = goodness.measure_goodness(np.linspace(-0.1, 0.1, 2001))
    assert sizes == pytest.approx((0.05, 0.09, 0.1), rel=1e-3)
    assert goodness.percentages(sizes) == "5, 9 and 10 %"
    assert goodness.f_test_p_value(2.71, 4, 23) == pytest.approx(0.0552, abs=1e-4)
    few = np.random.default_rng(0).normal(size=9)
    assert goodness.find_arch(few, np.ones((9, 1)), few[None], 9) == 0
    # Copies of runs do not count as runs.
    line = np.linspace(-1, 1, 12)
    noisy = line**3 + np.random.default_rng(0).normal(0, 0.5, 12)
    copies = np.repeat(noisy, 20)
    again = np.repeat(line, 20)
    columns = np.stack([np.ones(240), again], 1)
    assert goodness.find_arch(copies, columns, again[None], 240) > 0.1
    assert goodness.find_arch(copies, columns, again[None], 12) == 0


@pytest.mark.parametrize(
    ("covered", "num_points", "doubted"),
    [(0.58, 30, True), (0.79, 30, False), (0.79, 200, True), (0.81, 10**5, False)],
)
def test_intervals_that_held_out_runs_leave_are_doubted(
    covered: float, num_points: int, doubted: bool
) -> None:
    score = HeldOut(num_points, 0.01, 0.02, 0.01, covered)
    warnings = held_out_warnings(score)
    assert warnings == doubted * [
        f"of {num_points} held-out runs {covered:.0%} are inside their 90 % "
        "intervals: those are too narrow beyond the runs fitted"
    ]
    assert held_out_warnings(score._replace(covered=None)) == []
