"""Loads whose measurement narrows a prediction."""

import jax.numpy as jnp
import pytest

from scaling import shapes
from scaling.calibration import (
    ServerSetup,
    SteadyLoad,
    load_posterior,
    rank_measurements,
    take_draws,
)
from scaling.costs import find_device

SETUP = ServerSetup(
    model=shapes.describe("llama-3.1-8b"),
    device=find_device("h100"),
    max_model_len=8192,
)


def load_of(rate: float, prompt: float, answer: float) -> SteadyLoad:
    numbers = (rate, prompt, prompt, answer, 128)
    return SteadyLoad(*map(jnp.float32, numbers))


@pytest.mark.thorough
def test_a_similar_load_narrows_the_interval_most() -> None:
    target = load_of(4, 2000, 400)
    near = load_of(2, 2000, 400)
    far = load_of(0.1, 20, 8)
    overload = load_of(4000, 2000, 400)
    gains = rank_measurements(load_posterior(), SETUP, target, [far, near, overload])
    assert [float(gain.load.rate_per_s) for gain in gains] == pytest.approx([2, 0.1])
    for gain in gains:
        assert 0 < gain.end_to_end < 1
        assert 0 < gain.first_token < 1
    assert gains[0].end_to_end < 0.7 * gains[1].end_to_end


def test_few_draws_are_refused() -> None:
    posterior = take_draws(load_posterior(), 3)
    with pytest.raises(ValueError, match="3 draws of the posterior must be at least 8"):
        rank_measurements(posterior, SETUP, load_of(1, 9, 9), [])
