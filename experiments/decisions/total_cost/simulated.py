"""The largest load of a simulated server, with requests that arrive at random."""

import numpy as np
from jaxtyping import Float

from scaling.calibration import (
    LatencyLimits,
    MeasuredServer,
    ServerLoad,
    ServerRun,
    ServerSetup,
    choose_warm_up_s,
    draw_arrivals,
    draw_coefficients,
    draw_loop_posterior,
    load_duration_s,
    load_loops,
    make_server_load,
    simulate_server,
)

_WINDOW_S = 60.0
"""Long enough that ends and arrivals of a steady load differ by less than 5 %."""
_STEADY_SHARE = 0.95
"""Least ends over arrivals in the window of a load that a server sustains."""
_RATE_SHARES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
"""Simulated rates, relative to the expected one."""


def simulate_goodput(
    server: MeasuredServer,
    limits: LatencyLimits,
    rate_per_s: float,
    *,
    num_draws: int,
    seed: int,
) -> Float[np.ndarray, " draws"]:
    """Finds the largest rate of Poisson arrivals whose mean latencies are in limits.

    The step times have coefficients drawn from the fit of public tables, as in
    `find_goodput`; scheduling, memory and queues are simulated.

    Args:
      server: the server, with the requests at a time at the expected rate.
      limits: the limits.
      rate_per_s: expected largest rate; rates from 0.7 to 1.5 times it are simulated.
      num_draws: draws of the coefficients, at least 2.
      seed: seed of coefficients and arrivals.
    """
    posterior = draw_loop_posterior(server, load_loops(), num=num_draws, seed=seed)
    prompt = round(server.prompt_tokens)
    answer = round(server.answer_tokens)
    setup = ServerSetup(
        model=server.model,
        device=server.device,
        tensor_parallel=server.num_devices,
        max_model_len=prompt + answer,
        max_num_batched_tokens=8192,
        max_num_seqs=max(64, 2 * round(server.concurrency)),
    )
    end_to_end_s = server.concurrency / rate_per_s
    rates = rate_per_s * np.array(_RATE_SHARES)
    loads = [_draw_load(setup, x, end_to_end_s, prompt, answer, seed) for x in rates]
    coefficients = draw_coefficients(posterior.deviations)
    runs = simulate_server(setup, loads, coefficients, num_slots=128)
    worst = np.stack([_worst_latency(x, limits) for x in runs], axis=1)
    return np.array([find_crossing(rates, x) for x in worst])


def _draw_load(
    setup: ServerSetup,
    rate_per_s: float,
    end_to_end_s: float,
    prompt: int,
    answer: int,
    seed: int,
) -> ServerLoad:
    warm_up_s = choose_warm_up_s(end_to_end_s)
    duration_s = load_duration_s(warm_up_s, _WINDOW_S, answer)
    num = int(1.5 * rate_per_s * duration_s) + 16
    rng = np.random.default_rng(seed)
    arrival_s = draw_arrivals(rng, "poisson", rate_per_s=float(rate_per_s), num=num)
    arrival_s = arrival_s[: np.searchsorted(arrival_s, duration_s)]
    lengths = np.full(arrival_s.size, 1)
    return make_server_load(
        arrival_s,
        prompt * lengths,
        answer * lengths,
        prefix_tokens=0 * lengths,
        block_size=setup.block_size,
        warm_up_s=warm_up_s,
        window_s=_WINDOW_S,
    )


def _worst_latency(
    run: ServerRun, limits: LatencyLimits
) -> Float[np.ndarray, " draws"]:
    """Returns the larger of both mean latencies over its limit, for each draw.

    It is infinite if fewer requests end in the window than arrive: their number, and
    with it the latency, still grows.
    """
    latencies = run.latencies()
    worst = np.maximum(
        latencies.first_token_s.mean(axis=1) / limits.first_token_s,
        latencies.inter_token_s.mean(axis=1) / limits.token_s,
    )
    num_arrivals = int(run.load.is_measured.sum())
    is_growing = run.num_finished() < _STEADY_SHARE * num_arrivals
    return np.where(run.is_overloaded() | is_growing, np.inf, worst)


def find_crossing(
    rates: Float[np.ndarray, " rates"], worst: Float[np.ndarray, " rates"]
) -> float:
    """Returns the rate at which a rising latency over its limit reaches 1.

    Logarithms are interpolated. The last rate if all latencies are within the limit,
    the rate before an overloaded one, and 0 if the first rate misses the limit.

    Args:
      rates: ascending rates.
      worst: latencies over their limits; infinity for an overloaded server.
    """
    misses = np.flatnonzero(worst > 1)
    if not misses.size:
        return float(rates[-1])
    first = int(misses[0])
    if first == 0:
        return 0.0
    if not np.isfinite(worst[first]):
        return float(rates[first - 1])
    logs = np.log(worst[[first - 1, first]])
    share = -logs[0] / (logs[1] - logs[0])
    return float(rates[first - 1] * (rates[first] / rates[first - 1]) ** share)
