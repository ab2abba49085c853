"""The surface over rate and batch: exact recovery, intervals, misses."""

import itertools

import numpy as np
import pytest

from scaling.forecasts import (
    STEP_LAW_BATCH,
    STEP_LAW_RATE,
    PowerPair,
    copied_pair,
    fit_rate_batch,
    lost_by_miss,
    mean_pair,
    nearest_run,
    predict_rate_batch,
    score_pair,
)
from scaling.logs import RunSize, TunedCell
from tests.support.refusals import refused

RATE = PowerPair(2.0, -0.6, 0.25)
BATCH = PowerPair(3e-4, -0.1, 0.6)
P, S, Q, SKEW = 0.09, -0.03, 0.07, 0.2


def make_cells(noise: float = 0.0) -> list[TunedCell]:
    rng = np.random.default_rng(0)
    cells = []
    for n, tokens in itertools.product((2e8, 4e8, 8e8), (20, 100)):
        size = RunSize(n, n * tokens)
        grid = itertools.product(np.geomspace(1e-4, 2e-2, 16), 2.0 ** np.arange(4, 12))
        rate, batch = np.array([*grid]).T
        u = np.log(rate / RATE.value(size))
        v = np.log(batch / BATCH.value(size))
        w = (np.exp(SKEW * u) - 1) / SKEW
        excess = (P * w + S * v) ** 2 + (Q * v) ** 2
        floor = 1.7 + 400 / n**0.34 + 400 / size.num_tokens**0.28
        loss = floor * np.exp(excess + noise * rng.normal(size=u.size))
        cells.append(TunedCell(size, rate, batch, loss, False))
    return cells


def test_exact_runs_return_the_surface() -> None:
    fit = fit_rate_batch(make_cells())
    size = RunSize(2e9, 1e11)
    prediction = predict_rate_batch(fit, size)
    assert prediction.rate == pytest.approx(RATE.value(size), rel=1e-3)
    assert prediction.batch == pytest.approx(BATCH.value(size), rel=1e-3)
    assert fit.rate == pytest.approx(RATE, rel=1e-3)
    assert np.abs(fit.valley) == pytest.approx([P, -S, Q, SKEW], rel=1e-3)
    assert fit.median_residual < 1e-6
    for size, floor in fit.floors.items():
        truth = 1.7 + 400 / size.num_params**0.34 + 400 / size.num_tokens**0.28
        assert floor == pytest.approx(truth, rel=1e-5)
    assert len(fit.refits) == 6


def test_a_miss_loses_what_the_surface_has() -> None:
    fit = fit_rate_batch(make_cells())
    size = RunSize(2e9, 1e11)
    best = predict_rate_batch(fit, size)
    assert lost_by_miss(fit, size, best.rate, best.batch) == pytest.approx(0, abs=1e-9)
    w = (np.exp(SKEW * np.log(2)) - 1) / SKEW
    lost = lost_by_miss(fit, size, 2 * best.rate, best.batch / 3)
    excess = (P * w - S * np.log(3)) ** 2 + (Q * np.log(3)) ** 2
    assert lost == pytest.approx(np.expm1(excess), rel=1e-2)
    # The rate is skewed: too large costs more than too small.
    assert lost_by_miss(fit, size, best.rate * 2, best.batch) > lost_by_miss(
        fit, size, best.rate / 2, best.batch
    )


def test_intervals_are_students_t_of_refits_and_scatter() -> None:
    fit = fit_rate_batch(make_cells(noise=1e-3))
    size = RunSize(2e9, 1e11)
    logs = np.log([rate.value(size) for rate, _ in fit.refits])
    spread = 5 / 6 * ((logs - logs.mean()) ** 2).sum() + fit.scatter[0] ** 2
    low, high = predict_rate_batch(fit, size).rate_interval
    # 2.35336 is the 95 % quantile of t with 3 degrees of freedom.
    assert np.log(high / low) / 2 == pytest.approx(2.35336 * spread**0.5, rel=1e-4)
    truth = RATE.value(size)
    assert low < truth < high


def test_baselines_copy_the_nearest_cell_and_the_mean() -> None:
    cells = make_cells()
    near = cells[3]
    pair = copied_pair(cells, RunSize(*np.multiply(near.size, 1.1)))
    assert pair == (near.rate[near.best], near.batch[near.best])
    logs = [np.log([x.rate[x.best], x.batch[x.best]]) for x in cells]
    assert mean_pair(cells) == pytest.approx(np.exp(np.mean(logs, axis=0)))
    i = nearest_run(near, near.rate[7] * 1.05, near.batch[7] * 0.95)
    assert i == 7
    score = score_pair(near, near.rate[7] * 1.05, near.batch[7] * 0.95)
    assert score[:3] == (near.rate[7], near.batch[7], near.loss[7])
    assert score.lost == pytest.approx(near.loss[7] / min(near.loss) - 1)
    ratio = near.rate[7] * 1.05 / near.rate[near.best]
    assert score.rate_factor == pytest.approx(max(ratio, 1 / ratio))
    # Published: 1.79 N^-0.713 D^0.307, and 0.58 D^0.571 tokens.
    size = RunSize(1e9, 1e11)
    assert STEP_LAW_RATE.value(size) == pytest.approx(1.63e-3, rel=5e-3)
    assert STEP_LAW_BATCH.value(size) / 2048 == pytest.approx(541, rel=1e-2)


def test_cells_that_cannot_be_fitted_are_refused_or_named() -> None:
    cells = make_cells()
    with refused("cells of N and D with 6 runs near their lowest loss"):
        fit_rate_batch(cells[:3])
    with refused("a fit needs 4, of several N and several D"):
        fit_rate_batch([cells[0], cells[0], cells[1], cells[1]])
    edge = cells[0]
    mask = edge.rate <= RATE.value(edge.size)
    arrays = (x[mask] for x in (edge.rate, edge.batch, edge.loss))
    fit = fit_rate_batch([TunedCell(edge.size, *arrays, False), *cells[1:]])
    assert fit.warnings == [
        f"{edge.size.label}: the best learning rate is at the edge of its grid"
    ]
