"""The largest load of servers under limits of latencies, against plain searches."""

import dataclasses

import numpy as np
import pytest

from scaling.calibration import (
    LOOP_DISCREPANCY,
    PUBLISHED_POWER,
    Goodput,
    LatencyLimits,
    MeasuredServer,
    count_server,
    find_goodput,
    load_loops,
    make_replica,
    predict_request_joules,
    predict_servers,
    predict_training_watts,
)
from scaling.costs import find_device
from scaling.shapes import describe
from tests.support.measured_servers import make_server
from tests.support.refusals import refused

pytestmark = pytest.mark.thorough

CALIBRATION = load_loops()
LIMITS = LatencyLimits(first_token_s=0.3, token_s=0.03)


def replica(model: str, num_devices: int, device: str = "h100") -> MeasuredServer:
    return make_replica(
        describe(model),
        find_device(device),
        num_devices,
        prompt_tokens=1024,
        answer_tokens=256,
    )


SERVERS = [
    replica("qwen3-8b", 1),
    replica("qwen3-32b", 1),
    replica("llama-3.1-70b", 4),
    replica("llama-3.1-70b", 1),
    replica("qwen3-8b", 1, "a100-80gb"),
]


@pytest.fixture(scope="module")
def goodput() -> Goodput:
    return find_goodput(SERVERS, LIMITS, CALIBRATION, num_draws=400)


def loaded(server: MeasuredServer, concurrency: float) -> MeasuredServer:
    return dataclasses.replace(server, concurrency=float(concurrency))


def test_one_more_request_misses_a_limit_or_the_memory(goodput: Goodput) -> None:
    at = goodput.concurrency[0]
    fits = [0, 1, 2, 4]
    below, above = (
        predict_servers([loaded(SERVERS[i], at[i] * x) for i in fits], CALIBRATION)
        for x in (0.999, 1.01)
    )
    limits = np.array([LIMITS.token_s, LIMITS.first_token_s])
    assert np.all(below.median_s <= limits)
    for row, server in enumerate(fits):
        memory = float(count_server(SERVERS[server]).kv_capacity) / (1024 + 128)
        misses = (above.median_s[row] > limits).any()
        assert misses or at[server] == pytest.approx(memory, rel=1e-3)
        # Little's law with the latencies of the same load.
        times = predict_servers([loaded(SERVERS[server], at[server])], CALIBRATION)
        token_s, first_s = times.median_s[0]
        rate = at[server] / (first_s + 255 * token_s)
        assert goodput.requests_per_s[0, server] == pytest.approx(rate, rel=1e-4)
        assert goodput.token_s[0, server] == pytest.approx(token_s, rel=1e-4)
    assert goodput.requests_per_s[:, 3].max() == 0.0  # 140 GB on one device


def test_tighter_limits_and_larger_models_take_fewer_requests(
    goodput: Goodput,
) -> None:
    rates = goodput.requests_per_s[0]
    assert rates[0] > rates[1] > 0
    assert rates[4] < rates[0]
    half = LatencyLimits(0.3, 0.015)
    tight = find_goodput(SERVERS, half, CALIBRATION).requests_per_s
    assert tight.shape == (1, len(SERVERS))
    assert np.all(tight <= rates)
    assert tight[0, 0] < 0.9 * rates[0]
    impossible = LatencyLimits(token_s=1e-4)
    none = find_goodput(SERVERS[:1], impossible, CALIBRATION)
    assert none.requests_per_s[0, 0] == 0
    assert none.token_s[0, 0] > 1e-4
    # Without limits memory and the largest fitted batch bound the load.
    free = find_goodput(SERVERS[:1], LatencyLimits(), CALIBRATION)
    memory = float(count_server(SERVERS[0]).kv_capacity) / (1024 + 128)
    assert free.concurrency[0, 0] == pytest.approx(memory, rel=1e-4)


def test_draws_spread_like_the_errors_of_models_that_were_not_fitted(
    goodput: Goodput,
) -> None:
    rates = goodput.requests_per_s[1:, 0]
    # The limit of first tokens, whose error is large, lowers the median.
    assert np.median(rates) == pytest.approx(goodput.requests_per_s[0, 0], rel=0.2)
    spread = np.log(rates[rates > 0]).std()
    assert 0.5 * LOOP_DISCREPANCY[False][0] < spread < 1.5
    # Another seed gives other draws, and the same mode.
    other = find_goodput(SERVERS[:1], LIMITS, CALIBRATION, num_draws=3, seed=1)
    assert other.requests_per_s[0, 0] == pytest.approx(
        goodput.requests_per_s[0, 0], rel=1e-5
    )
    assert not np.isclose(other.requests_per_s[1:, 0], rates[:3]).any()


def test_energy_of_a_request_is_power_over_rate(goodput: Goodput) -> None:
    joules = predict_request_joules(SERVERS, goodput, CALIBRATION)
    assert np.isnan(joules[3])
    at = loaded(SERVERS[0], float(goodput.concurrency[0, 0]))
    watts = predict_servers([at], CALIBRATION).watts[0]
    rate = goodput.requests_per_s[0, 0]
    assert joules[0] == pytest.approx(watts / rate, rel=1e-4)
    without = CALIBRATION._replace(power=None)
    assert np.isnan(predict_request_joules(SERVERS, goodput, without)).all()
    device = find_device("h100")
    assert predict_training_watts(device, 0.1) == pytest.approx(
        700 * (PUBLISHED_POWER.idle + 0.1 * PUBLISHED_POWER.products), rel=1e-9
    )
    assert predict_training_watts(device, 0.6) == 700


def test_kinds_of_models_are_not_mixed() -> None:
    mixed = [SERVERS[0], make_server("mixtral-8x7b")]
    with refused("servers must be one or more of one kind, dense or mixtures"):
        find_goodput(mixed, LIMITS, CALIBRATION)
    with refused("servers must be one or more"):
        find_goodput([], LIMITS, CALIBRATION)
