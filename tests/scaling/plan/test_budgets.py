"""Optima in closed form against searches, and against published numbers."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from scaling.laws import CHINCHILLA, CONSTANTS, LAWS, TwoPowers, compute_optimum
from scaling.plan import DataLimit, best_offer, budgets, parse_offer

LECTURE = budgets.law_two_powers(CHINCHILLA, CONSTANTS["lecture"])
FLOPS = 5e6 / 4 * 3600 * 312e12 * 0.4
KAPLAN = dict(Nc=6.4e13, Dc=1.8e13, alpha_N=0.076, alpha_D=0.103)
C4 = budgets.law_two_powers(
    CHINCHILLA,
    dict(
        A=math.exp(6.255414),
        B=math.exp(7.3049974),
        E=math.exp(0.6254804),
        alpha=0.3526596,
        beta=0.3526596,
    ),
)
"""Of Muennighoff et al. 2023, digits of their README."""


@pytest.mark.parametrize("name", [*CONSTANTS, "kaplan"])
def test_the_closed_form_is_what_a_search_finds(name: str) -> None:
    law = LAWS["kaplan"] if name == "kaplan" else CHINCHILLA
    coefficients = KAPLAN if name == "kaplan" else CONSTANTS[name]
    powers = budgets.law_two_powers(law, coefficients)
    for flops in (1e15, 5.76e23, 1e28):
        budget = budgets.allocate_budget(powers, flops)
        assert budget == pytest.approx(
            compute_optimum(law, coefficients, flops), rel=1e-12
        )
        assert budgets.lifetime_flops(*budget[:2]) == pytest.approx(flops, rel=1e-14)
        searched = budgets.search_params(powers, flops)
        assert budget.num_params == pytest.approx(searched, rel=1e-6)


def test_the_lecture_and_the_paper() -> None:
    assert FLOPS == pytest.approx(5.616e23, rel=1e-12)
    budget = budgets.allocate_budget(LECTURE, FLOPS)
    assert budget.num_params == pytest.approx(4.7476e10, rel=1e-4)
    assert budget.num_tokens == pytest.approx(1.9715e12, rel=1e-4)
    assert budget.loss == pytest.approx(1.89696, abs=1e-5)
    # Hoffmann et al.: 5.76e23 FLOPs; rounding the exponents of the source's digits
    # moves tokens per parameter from 59 to 93.
    for name, ratio in (("hoffmann-tex", 59), ("hoffmann", 93)):
        powers = budgets.law_two_powers(CHINCHILLA, CONSTANTS[name])
        optimum = budgets.allocate_budget(powers, 5.76e23)
        assert round(optimum.num_tokens / optimum.num_params) == ratio


def test_serving_when_the_sum_is_raised_to_a_power() -> None:
    powers = budgets.law_two_powers(LAWS["kaplan"], KAPLAN)
    best = budgets.allocate_budget(powers, 1e23, inference_tokens=1e12)
    cheapest = budgets.cheapest_model(powers, best.loss, inference_tokens=1e12)
    assert cheapest == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("served", [1e9, 2e12, 1e14])
def test_serving_at_equal_loss_and_for_a_budget(served: float) -> None:
    free = budgets.allocate_budget(LECTURE, FLOPS)
    cheapest = budgets.cheapest_model(LECTURE, free.loss, inference_tokens=served)
    assert cheapest.loss == pytest.approx(free.loss, rel=1e-14)
    lifetime = budgets.lifetime_flops(*cheapest[:2], served)
    # Every other model with this loss takes more.
    sizes = cheapest.num_params * np.exp(np.linspace(-0.3, 0.3, 601))
    left = cheapest.loss - LECTURE.floor - LECTURE.A * sizes**-LECTURE.alpha
    tokens = (LECTURE.B / left) ** (1 / LECTURE.beta)
    others = budgets.lifetime_flops(sizes, tokens, served)
    assert np.argmin(others) == 300
    assert others[300] == pytest.approx(lifetime, rel=1e-9)
    assert lifetime <= budgets.lifetime_flops(*free[:2], served)
    # With that as the budget the same model is the best.
    same = budgets.allocate_budget(LECTURE, lifetime, inference_tokens=served)
    assert same == pytest.approx(cheapest, rel=1e-9)
    searched = budgets.search_params(LECTURE, lifetime, served)
    assert same.num_params == pytest.approx(searched, rel=1e-6)


def test_serving_as_published() -> None:
    """Sardana et al. 2024, section 1: 7B for 13B, 2.1 times the data, 17 % saved."""
    taken = CONSTANTS["hoffmann"] | {"alpha": 0.336, "beta": 0.283}
    powers = budgets.law_two_powers(CHINCHILLA, taken)
    # The FLOPs whose optimum has 13 billion parameters: N* = G (C/6)^a.
    scale = budgets.allocate_budget(powers, 6.0).num_params
    exponent = powers.beta / (powers.alpha + powers.beta)
    usual = budgets.allocate_budget(powers, 6 * (13e9 / scale) ** (1 / exponent))
    assert usual.num_params == pytest.approx(13e9, rel=1e-9)
    cheapest = budgets.cheapest_model(powers, usual.loss, inference_tokens=2e12)
    assert cheapest.num_params == pytest.approx(7e9, rel=0.01)
    assert cheapest.num_tokens / usual.num_tokens == pytest.approx(2.1, abs=0.1)
    before, after = (budgets.lifetime_flops(*x[:2], 2e12) for x in (usual, cheapest))
    assert before - after == pytest.approx(1.7e22, rel=0.01)
    assert 1 - after / before == pytest.approx(0.17, abs=0.005)


def test_a_law_without_coefficients_has_no_optimum(no_type_checks) -> None:
    wrong: Any = CHINCHILLA
    with pytest.raises(ValueError, match=r"^powers=Law.* must be a TwoPowers, such as"):
        budgets.allocate_budget(wrong, FLOPS)


def test_nothing_served_is_the_compute_optimum() -> None:
    free = budgets.allocate_budget(LECTURE, FLOPS)
    assert budgets.cheapest_model(LECTURE, free.loss) == pytest.approx(free, rel=1e-9)
    nearly = budgets.allocate_budget(LECTURE, FLOPS, inference_tokens=1e-3)
    assert nearly == pytest.approx(free, rel=1e-9)
    with pytest.raises(ValueError, match="above the floor"):
        budgets.cheapest_model(LECTURE, 1.69)


def test_repeated_data_as_published() -> None:
    """The two models of figure 1, and the grid search of their README."""
    for num_params, num_tokens, loss in (
        (6.34e9, 242e9, 2.2256440889984477),
        (8.67e9, 178e9, 2.2269634075087867),
    ):
        budget_loss = budgets.budget_loss(C4, num_params, num_tokens, DataLimit(25e9))
        assert budget_loss == pytest.approx(loss, rel=1e-12)
    flops = 6 * 8.67e9 * 178e9
    budget = budgets.allocate_budget(C4, flops, repeating=DataLimit(25e9))
    assert budget.num_tokens == pytest.approx(227e9, rel=0.005)
    assert budget.num_params == pytest.approx(6.8e9, rel=0.005)
    assert budget.num_tokens / 25e9 == pytest.approx(9.1, abs=0.05)


@pytest.mark.parametrize("powers", [C4, LECTURE])
def test_repetition_is_the_law_that_is_fitted(powers: TwoPowers) -> None:
    law = LAWS["data-constrained"]
    halves = budgets.MUENNIGHOFF
    data = {
        "num_params": np.array([1e9, 4e10, 2e9, 1e10]),
        "num_tokens": np.array([1e10, 1e11, 3e12, 1e9]),
        "num_unique_tokens": np.full(4, 2e10),
    }
    named = [powers.A, powers.B, powers.floor, powers.alpha, powers.beta, *halves]
    with jax.enable_x64(True):
        expected = np.asarray(law.predict(np.array(named), data))
    num_params = data["num_params"]
    num_tokens = data["num_tokens"]
    losses = budgets.budget_loss(
        powers, num_params, num_tokens, DataLimit(2e10, halves)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_enough_data_leaves_the_closed_form() -> None:
    free = budgets.allocate_budget(C4, 1e22)
    enough = DataLimit(free.num_tokens * (1 + 1e-9))
    assert budgets.allocate_budget(C4, 1e22, repeating=enough) == free
    # With slightly less data, the search takes over without a jump.
    fewer = DataLimit(free.num_tokens * 0.999)
    near = budgets.allocate_budget(C4, 1e22, repeating=fewer)
    assert near.num_params == pytest.approx(free.num_params, rel=1e-2)
    assert near.loss == pytest.approx(free.loss, rel=1e-5)
    served: Any = {"inference_tokens": 1e12}
    few = budgets.allocate_budget(C4, 1e22, repeating=DataLimit(1e10), **served)
    spent = budgets.lifetime_flops(few.num_params, few.num_tokens, 1e12)
    assert spent == pytest.approx(1e22, rel=1e-9)
    assert few.loss > budgets.allocate_budget(C4, 1e22, **served).loss


@pytest.mark.parametrize("unique", [2e9, 2e10, 2e11])
def test_the_cheapest_model_under_a_limit_on_unique_tokens(unique: float) -> None:
    repeating = DataLimit(unique)
    served = 1e12
    target = budgets.allocate_budget(C4, 1e22, repeating=repeating).loss
    how: Any = {"inference_tokens": served, "repeating": repeating}
    cheapest = budgets.cheapest_model(C4, target, **how)
    assert cheapest.loss == pytest.approx(target, rel=1e-9)
    # A dense search: for every N the fewest tokens that reach the loss.
    sizes = cheapest.num_params * np.geomspace(0.3, 3, 601)
    low = np.full(sizes.size, 0.0)
    high = np.full(sizes.size, math.log(1e16))
    for _ in range(80):
        middle = (low + high) / 2
        is_above = budgets.budget_loss(C4, sizes, np.exp(middle), repeating) > target
        low = np.where(is_above, middle, low)
        high = np.where(is_above, high, middle)
    min_flops = np.nanmin(budgets.lifetime_flops(sizes, np.exp(high), served))
    spent = budgets.lifetime_flops(cheapest.num_params, cheapest.num_tokens, served)
    assert spent == pytest.approx(min_flops, rel=1e-4)
    assert spent <= min_flops * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "coefficients", "line"),
    [
        ("power", dict(a=1.0, b=0.1), "does not define how loss falls"),
        ("chinchilla", CONSTANTS["lecture"] | {"alpha": -0.1}, "alpha=-0.1"),
        ("chinchilla", CONSTANTS["lecture"] | {"B": math.nan}, "B=nan"),
        ("chinchilla", CONSTANTS["lecture"] | {"E": -1.0}, "floor of -1"),
    ],
)
def test_laws_without_an_optimum(name: str, coefficients: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        budgets.law_two_powers(LAWS[name], coefficients)


def test_offers() -> None:
    offers = [parse_offer(x) for x in ("t4:1.0:65", "a100:4.0:312", "v100:2.5:125")]
    best = best_offer(offers, 0.4)
    assert (best.name, best.flops_per_s, best.memory_bytes) == ("a100", 312e12, 80e9)
    assert best.flops_per_usd(0.4) == pytest.approx(1.1232e17, rel=1e-12)
    assert parse_offer("h100:2").flops_per_s == 989.4e12
    assert parse_offer("mine:2:100").memory_bytes is None
    # Two equally good offers: the first.
    same = [parse_offer("x:1:10"), parse_offer("y:2:20")]
    assert best_offer(same, 1.0).name == "x"
    with pytest.raises(ValueError, match="h100 has no price"):
        best_offer([parse_offer("h100"), same[0]], 0.4)


@pytest.mark.parametrize(
    "text",
    ["", ":4:312", "a100:x:312", "a100:4:-1", "a100:0:312", "a100:nan", "a:1:2:3"],
)
def test_malformed_offers(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME:USD_PER_HOUR:TFLOPS"):
        parse_offer(text)
