"""Noise of requests, from the tails of measured stages."""

import numpy as np
import pytest
from scipy import stats

from scaling.calibration import find_request_noise, noise_quantile, tail_factor


@pytest.mark.parametrize("level", [0.01, 0.3, 0.5, 0.9, 0.99, 0.9999])
def test_quantiles_are_those_of_scipy(level: float) -> None:
    assert noise_quantile(level) == pytest.approx(stats.t(4).ppf(level), abs=1e-9)


def test_noise_is_the_excess_over_the_simulated_tail() -> None:
    """With it, simulated tails of 0.03 become the measured ones of 0.05."""
    measured = np.full((3, 2), 0.05)
    simulated = np.full((3, 2), 0.03)
    noise = find_request_noise(measured, simulated)
    np.testing.assert_allclose(noise.doubt, 0, atol=1e-12)
    factor = tail_factor(np.exp([0.03]), np.ones(1), 0.99, noise.scale[:1])
    assert factor == pytest.approx(np.exp(0.02))
    # The middle of three stages counts, one without an excess as well.
    measured[:, 1] = (0.02, 0.05, 0.5)
    wide = find_request_noise(measured, simulated)
    assert wide.scale[1] == pytest.approx(noise.scale[1])
    assert wide.doubt[1] > 0.5


def test_noise_of_requests_has_the_factor() -> None:
    """Against draws: simulated latencies times noise of a fifth of their tail."""
    rng = np.random.default_rng(0)
    logs = 0.05 * rng.standard_t(4, 200_000)
    noisy = np.exp(logs + 0.02 * rng.standard_t(4, logs.size))
    plain = np.exp(logs)
    for level in (0.9, 0.99):
        value, median = np.quantile(plain, [[level], [0.5]])
        factor = tail_factor(value, median, level, 0.02)
        assert value * factor == pytest.approx(np.quantile(noisy, level), rel=0.01)
    none = tail_factor(np.array([1.2]), np.array([1.0]), 0.99, 0.0)
    np.testing.assert_allclose(none, 1.0)
