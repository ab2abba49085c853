"""The cheapest model to train and serve, against closed forms and plain searches."""

import math
from typing import Any

import numpy as np
import pytest

from scaling.laws import CHINCHILLA, CONSTANTS, LAWS, TwoPowers
from scaling.plan import (
    CostOptimum,
    ServingLadder,
    allocate_budget,
    cheapest_model,
    closed_form_ladder,
    ladder_cost,
    law_two_powers,
    tokens_for_loss,
    total_cost,
    total_cost_spread,
)
from tests.support.refusals import refused

LECTURE = law_two_powers(CHINCHILLA, CONSTANTS["lecture"])
KAPLAN = law_two_powers(
    LAWS["kaplan"], dict(Nc=6.4e13, Dc=1.8e13, alpha_N=0.076, alpha_D=0.103)
)
FLOP_COST = 4 / 3600 / 312e12 / 0.4
"""An A100 at 4 USD an hour and an MFU of 40 %."""
BUDGET = 5e6
SIZES = np.geomspace(3e7, 3e11, 40)
AIMS: list[dict[str, Any]] = [{"budget": BUDGET}, {"target_loss": 2.0}]


def solve(
    ladder: ServingLadder, powers: TwoPowers = LECTURE, **aim: Any
) -> CostOptimum:
    return total_cost(powers, ladder, flop_cost=FLOP_COST, **aim)


def make_ladder(costs: np.ndarray, replica: np.ndarray | None = None) -> ServingLadder:
    kinds = np.zeros(len(costs), int) if replica is None else replica
    return ServingLadder(SIZES[: len(costs)], np.asarray(costs, float), kinds)


@pytest.mark.parametrize("powers", [LECTURE, KAPLAN])
def test_no_load_is_the_compute_optimum(powers: TwoPowers) -> None:
    free = make_ladder(np.zeros(SIZES.size))
    best = solve(free, powers, budget=BUDGET)
    expected = allocate_budget(powers, BUDGET / FLOP_COST)
    assert best[:3] == pytest.approx(expected, rel=1e-6)
    assert best.training_cost == pytest.approx(BUDGET, rel=1e-12)
    assert (best.serving_cost, best.is_edge) == (0.0, False)
    best = solve(free, powers, target_loss=expected.loss)
    assert best[:3] == pytest.approx(expected, rel=1e-6)
    assert best.cost == pytest.approx(BUDGET, rel=1e-9)


@pytest.mark.parametrize("powers", [LECTURE, KAPLAN])
@pytest.mark.parametrize("served", [1e10, 2e12, 3e13])
def test_two_operations_for_each_parameter_and_token_are_sardanas_optimum(
    powers: TwoPowers, served: float
) -> None:
    # Serving at half the MFU counts twice.
    ladder = closed_form_ladder(SIZES, served / 2, 2 * FLOP_COST)
    best = solve(ladder, powers, budget=BUDGET)
    expected = allocate_budget(powers, BUDGET / FLOP_COST, inference_tokens=served)
    assert best[:3] == pytest.approx(expected, rel=1e-6)
    assert best.cost == pytest.approx(BUDGET, rel=1e-12)
    target = expected.loss
    cheapest = cheapest_model(powers, target, inference_tokens=served)
    best = solve(ladder, powers, target_loss=target)
    assert best[:3] == pytest.approx(cheapest, rel=1e-6)
    assert best.serving_cost == pytest.approx(
        2 * best.num_params * served * FLOP_COST, rel=1e-9
    )


def plain_search(ladder: ServingLadder, aim: dict[str, Any]) -> tuple[float, float]:
    """Tries many sizes one by one; the costs of the ladder must rise."""
    if "budget" in aim:
        top = allocate_budget(LECTURE, BUDGET / FLOP_COST).num_params
    else:
        top = cheapest_model(LECTURE, aim["target_loss"]).num_params
    best = (math.inf, math.nan)
    rungs = [*zip(*(x.tolist() for x in ladder), strict=True)]
    for (n, cost, kind), (m, dearer, other) in zip(
        rungs, [*rungs[1:], rungs[-1]], strict=True
    ):
        steps = 400 if m > n else 1
        for i in range(steps):
            size = n * (m / n) ** (i / steps)
            if size > top:
                continue
            serving = cost * (dearer / cost) ** (i / steps)
            if kind != other and i > 0:
                serving = dearer
            if "budget" in aim:
                tokens = (BUDGET - serving) / (6 * FLOP_COST * size)
                if tokens <= 0:
                    continue
                value = (
                    LECTURE.floor
                    + LECTURE.A / size**LECTURE.alpha
                    + LECTURE.B / tokens**LECTURE.beta
                )
            else:
                left = aim["target_loss"] - LECTURE.floor
                left -= LECTURE.A / size**LECTURE.alpha
                if left <= 0:
                    continue
                tokens = (LECTURE.B / left) ** (1 / LECTURE.beta)
                value = 6 * FLOP_COST * size * tokens + serving
            best = min(best, (value, size))
    return best


@pytest.mark.parametrize("aim", AIMS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_plain_search_finds_the_same_model(aim: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = np.cumsum(rng.exponential(1.0, SIZES.size)) ** 2 * 10 ** rng.uniform(-1, 4)
    kinds = np.cumsum(rng.random(SIZES.size) < 0.3)
    ladder = make_ladder(costs, kinds)
    best = solve(ladder, **aim)
    value, size = plain_search(ladder, aim)
    actual = best.loss if "budget" in aim else best.cost
    assert actual <= value * (1 + 1e-12)
    assert actual == pytest.approx(value, rel=1e-5)
    assert best.num_params == pytest.approx(size, rel=0.02)
    assert best.serving_cost == pytest.approx(
        ladder_cost(ladder, best.num_params), rel=1e-6
    )


@pytest.mark.parametrize("aim", AIMS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_best_size_never_rises_with_load_or_price(
    aim: dict[str, Any], seed: int
) -> None:
    """Costs of sizes may be in any order, and kinds of servers change."""
    rng = np.random.default_rng(seed)
    costs = np.geomspace(1.0, 1e4, SIZES.size) * rng.lognormal(0.0, 0.5, SIZES.size)
    kinds = np.cumsum(rng.random(SIZES.size) < 0.2)
    sizes = [
        solve(make_ladder(costs * load, kinds), **aim).num_params
        for load in np.geomspace(1e-3, 1e4, 60)
    ]
    assert np.all(np.diff(sizes) <= 1e-6 * np.array(sizes[:-1]))
    assert sizes[-1] < 0.8 * sizes[0]


def test_whole_servers_may_favour_a_larger_model_at_a_higher_rate() -> None:
    """The documented exception: two whole servers that a larger model fills better."""
    kinds = np.arange(2)

    def best_size(rate: float) -> float:
        servers = np.ceil(rate / np.array([10.0, 9.0]))
        ladder = ServingLadder(np.array([3e9, 6e9]), 2e5 * servers, kinds)
        return solve(ladder, target_loss=2.1).num_params

    assert [best_size(x) for x in (9.0, 9.5, 10.5)] == pytest.approx(
        [6e9, 3e9, 6e9], rel=1e-9
    )


def test_sizes_between_kinds_of_servers_cost_as_much_as_the_larger() -> None:
    wide = np.array([1e9, 1e11])
    costs = np.array([1e3, 1e5])
    sizes = np.array([5e8, 1e9, 1.0001e9, 1e10, 1e11, 2e11])
    same = ServingLadder(wide, costs, np.zeros(2, int))
    expected = [1e3, 1e3, 1.0001e3, 1e4, 1e5, 2e5]
    np.testing.assert_allclose(ladder_cost(same, sizes), expected, rtol=1e-9)
    other = same._replace(replica=np.arange(2))
    expected = [1e3, 1e3, 1e5, 1e5, 1e5, 2e5]
    np.testing.assert_allclose(ladder_cost(other, sizes), expected, rtol=1e-9)
    for ladder in (same, other):
        best = solve(ladder, budget=BUDGET)
        assert 1e9 < best.num_params < 1e11
        cost = ladder_cost(ladder, best.num_params)
        assert best.serving_cost == pytest.approx(cost, rel=1e-9)
    # A size that no server takes is left out.
    costs = np.full(SIZES.size, np.inf)
    costs[5] = 10.0
    best = solve(make_ladder(costs), budget=BUDGET)
    assert best.num_params == pytest.approx(SIZES[5], rel=1e-12)
    # So is one that a larger one undercuts.
    costs = np.where(np.arange(SIZES.size) == 25, 1.0, 4.99e6)
    best = solve(make_ladder(costs), budget=BUDGET)
    assert SIZES[25] <= best.num_params * (1 + 1e-9) < SIZES[26]
    assert best.serving_cost < 1e6


@pytest.mark.parametrize("aim", AIMS, ids=str)
def test_intervals_are_quantiles_over_draws_of_law_and_servers(
    aim: dict[str, Any],
) -> None:
    rng = np.random.default_rng(0)
    laws = [LECTURE._replace(A=LECTURE.A * x) for x in rng.lognormal(0, 0.1, 20)]
    ladders = [
        closed_form_ladder(SIZES, 2e12 * x, FLOP_COST)
        for x in rng.lognormal(0, 0.5, 20)
    ]
    spread = total_cost_spread(laws, ladders, flop_cost=FLOP_COST, level=0.8, **aim)
    optima = [solve(x, y, **aim) for x, y in zip(ladders, laws, strict=True)]
    assert spread is not None
    assert (spread.num_draws, spread.num_without) == (20, 0)
    for name in ("num_params", "num_tokens", "loss", "cost", "serving_cost"):
        values = [getattr(x, name) for x in optima]
        ends = np.quantile(values, [0.1, 0.9])
        assert getattr(spread, name) == pytest.approx(ends, rel=1e-12)
    # One law for all draws, and draws without an optimum.
    broken = ladders[0]._replace(cost=np.full(SIZES.size, np.inf))
    single = total_cost_spread(
        [LECTURE], [*ladders[:5], broken], flop_cost=FLOP_COST, **aim
    )
    assert single is not None
    assert (single.num_draws, single.num_without) == (6, 1)
    assert single.num_params[1] < spread.num_params[1]
    none = total_cost_spread([LECTURE], [broken] * 3, flop_cost=FLOP_COST, **aim)
    assert none is None


def test_tokens_for_a_loss_invert_the_law() -> None:
    tokens = tokens_for_loss(KAPLAN, np.array([1e8, 1e10]), 3.0)
    inner = KAPLAN.A * np.array([1e8, 1e10]) ** -KAPLAN.alpha
    inner = (inner + KAPLAN.B * tokens**-KAPLAN.beta) ** KAPLAN.outer
    assert inner[1] + KAPLAN.floor == pytest.approx(3.0, rel=1e-12)
    assert np.isinf(tokens_for_loss(LECTURE, np.array([1e6]), 1.7)).all()


def test_refusals() -> None:
    ladder = make_ladder(np.geomspace(1, 1e4, SIZES.size))
    with refused("exactly one of budget=None and target_loss=None"):
        solve(ladder)
    with refused("exactly one of budget=1.0 and target_loss=2.0"):
        solve(ladder, budget=1.0, target_loss=2.0)
    with refused("target=1.69 must be above the floor"):
        solve(ladder, target_loss=1.69)
    with refused("budget=0.5 must leave a size of the ladder that can be"):
        solve(ladder, budget=0.5)
    with refused("budget=5e+06 must leave a size", "serving from 6e+06 to 6e+06"):
        solve(make_ladder(np.full(SIZES.size, 6e6)), budget=BUDGET)
    with refused("ladder.num_params must be above 0 and ascending"):
        solve(ladder._replace(num_params=SIZES[::-1]), budget=1.0)
    with refused("ladder.cost must be at least 0"):
        solve(ladder._replace(cost=-ladder.cost), budget=1.0)
    with refused("one cost and replica for each size: 40 sizes, 2 costs"):
        solve(ladder._replace(cost=ladder.cost[:2]), budget=1.0)
