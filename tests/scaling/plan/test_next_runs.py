"""Next runs lower the variance of an answer as exact updates of a normal law do."""

import numpy as np
import pytest

from scaling.plan import choose_next_runs
from tests.support.refusals import refused

NUM_RUNS = 6
RNG = np.random.default_rng(0)
SLOPES = RNG.normal(size=(NUM_RUNS, 3))
ASKED = RNG.normal(size=3)
NOISE = RNG.uniform(0.5, 2, NUM_RUNS)
FLOPS = np.array([1.0, 2, 4, 8, 16, 32])
DRAWS = RNG.normal(size=(4000, 3)) * [1.0, 2.0, 0.5]


def variance_after(places: list[int]) -> float:
    """Returns the answer's variance by the precisions of a normal law's runs."""
    precision = np.linalg.inv(np.cov(DRAWS, rowvar=False))
    for place in places:
        precision = precision + np.outer(SLOPES[place], SLOPES[place]) / NOISE[place]
    return float(ASKED @ np.linalg.solve(precision, ASKED))


@pytest.mark.parametrize("budget", [3.0, 30.0, 63.0])
def test_variances_are_those_of_a_normal_law(budget: float) -> None:
    choice = choose_next_runs(
        DRAWS @ ASKED, DRAWS @ SLOPES.T, NOISE, FLOPS, budget=budget, max_runs=6
    )
    assert 0 < sum(choice.flops) <= budget
    assert len({*choice.places}) == len(choice.places)
    for i, variance in enumerate(choice.variance, 1):
        expected = variance_after(choice.places[:i]) / variance_after([])
        assert variance == pytest.approx(expected, rel=1e-9)
    # Greedy by variance for each FLOP, or by variance: the better of both.
    ends = []
    for power in (0, 1):
        places: list[int] = []
        while True:
            left = budget - FLOPS[places].sum()
            rest = [i for i in range(6) if i not in places and FLOPS[i] <= left]
            if not rest:
                break
            before = variance_after(places)
            gains = [
                (before - variance_after([*places, i])) / FLOPS[i] ** power
                for i in rest
            ]
            places.append(rest[int(np.argmax(gains))])
        ends.append(variance_after(places))
    assert choice.variance[-1] == pytest.approx(min(ends) / variance_after([]))


def test_bad_runs_are_refused() -> None:
    answer = DRAWS @ ASKED
    losses = DRAWS @ SLOPES.T
    with refused("must be above 0"):
        choose_next_runs(answer, losses, 0 * NOISE, FLOPS, budget=9.0)
    with refused("answer must vary"):
        choose_next_runs(0 * answer, losses, NOISE, FLOPS, budget=9.0)
    with refused("budget=0.0 must be in (0, inf)"):
        choose_next_runs(answer, losses, NOISE, FLOPS, budget=0.0)
    assert choose_next_runs(answer, losses, NOISE, FLOPS, budget=0.5).places == []
