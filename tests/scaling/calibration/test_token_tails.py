"""Percentiles of the time between tokens, against drawn steps."""

import dataclasses

import numpy as np
import pytest

from scaling.calibration import (
    TAIL_LEVELS,
    LoopPrediction,
    TokenTail,
    fit_token_tail,
    predict_token_tails,
)
from scaling.costs import find_device
from tests.support.measured_servers import make_server

TAIL = TokenTail(1.5, 4e-3, {"b200": 0.3, "h100": 0.05, "": 0.1})
SERVERS = [
    make_server(device=find_device(device), answer_tokens=answer, is_median_step=True)
    for device in ("b200", "h100", "h200")
    for answer in (40.0, 400.0, 4000.0)
]
RUNNING = np.full(len(SERVERS), 33.0)
DECODE_S = 10e-3
MEAN_S = np.array([DECODE_S + 32 / x.answer_tokens * 2e-3 for x in SERVERS])
STEPS = np.full((len(SERVERS), 2), DECODE_S)
LOAD = LoopPrediction(STEPS, np.zeros_like(STEPS), RUNNING, MEAN_S)


def test_percentiles_are_those_of_drawn_steps() -> None:
    """A prompt adds 2 ms to the mean time, so 3 ms to its step, and 4 ms once."""
    rng = np.random.default_rng(0)
    predicted = predict_token_tails(SERVERS, LOAD, TAIL)
    for server, row in zip(SERVERS, predicted, strict=True):
        prompts = rng.poisson(33 / server.answer_tokens, 200_000)
        steps_s = DECODE_S + 3e-3 * prompts + 4e-3 * (prompts > 0)
        noise = TAIL.noise.get(server.device.name, 0.1)
        steps_s *= np.exp(noise * rng.normal(size=steps_s.size))
        drawn = np.quantile(steps_s, TAIL_LEVELS)
        np.testing.assert_allclose(row, drawn, rtol=0.02)


def test_a_fit_finds_the_percentiles_that_were_predicted() -> None:
    tails = predict_token_tails(SERVERS, LOAD, TAIL)
    measured = [
        dataclasses.replace(x, token_tail_s=tuple(row.tolist()))
        for x, row in zip(SERVERS, tails, strict=True)
    ]
    fit = fit_token_tail(measured, LOAD)
    assert fit.noise["b200"] == pytest.approx(0.3, rel=0.2)
    assert fit.noise["h100"] < 0.5 * fit.noise["b200"]
    np.testing.assert_allclose(
        predict_token_tails(SERVERS, LOAD, fit), tails, rtol=0.15
    )
