"""The largest load of a server under limits of its latencies, by a fit of tables.

A server in a closed loop of c requests takes `c / (t1 + (m - 1) t)` requests per
second, by Little's law, with the time to the first token t1, the time per token t and m
tokens of an answer. All three grow with c, so a bisection finds the largest c that
memory holds and the limits allow.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import validation
from scaling.calibration.closed_loops.closed_loop import (
    LoopCoefficients,
    find_loop_latency,
)
from scaling.calibration.closed_loops.loop_calibration import (
    LOOP_DISCREPANCY,
    LoopCalibration,
)
from scaling.calibration.closed_loops.measured_servers import MeasuredServer
from scaling.calibration.closed_loops.pooled_fit import (
    LoopPrediction,
    draw_deviations,
    known_groups,
    make_loop_coefficients,
    sizes_of_server,
)
from scaling.calibration.closed_loops.power import predict_watts
from scaling.calibration.closed_loops.row_costs import RowWork, stack_work
from scaling.calibration.load_sizes import outside_variance
from scaling.costs import Device
from scaling.shapes import ModelShape

_NUM_BISECTIONS = 32


class LatencyLimits(NamedTuple):
    """Largest allowed means of latencies in s; infinity for no limit."""

    first_token_s: float = math.inf
    token_s: float = math.inf


class Goodput(NamedTuple):
    """Largest load of servers under limits: at the mode of the fit, then for draws."""

    concurrency: Float[np.ndarray, "1+draws servers"]
    """Requests in the system."""
    requests_per_s: Float[np.ndarray, "1+draws servers"]
    """Requests that end per second; 0 if a single one misses a limit or does not fit
    into memory."""
    first_token_s: Float[np.ndarray, "1+draws servers"]
    """Mean time to the first token at that load; of one request if it is 0."""
    token_s: Float[np.ndarray, "1+draws servers"]
    """Mean time per token after the first."""


@validation.checks_numbers(prompt_tokens="[1, 1e9]", answer_tokens="[1, 1e9]")
def make_replica(
    model: ModelShape,
    device: Device,
    num_devices: int,
    *,
    prompt_tokens: int | float,
    answer_tokens: int | float,
) -> MeasuredServer:
    """Returns a vLLM server of a dense model in 16 bits, without measured times.

    Args:
      model: shape of the model.
      device: accelerator.
      num_devices: degree of tensor parallelism.
      prompt_tokens: mean length of the prompts.
      answer_tokens: mean length of the answers.
    """
    return MeasuredServer(
        name=model.name,
        engine="vllm",
        checkpoint=model.name,
        model=model,
        device=device,
        weight_format="bf16",
        num_devices=num_devices,
        data_parallel=1,
        expert_parallel=1,
        concurrency=1.0,
        prompt_tokens=float(prompt_tokens),
        answer_tokens=float(answer_tokens),
    )


@validation.checks_numbers(num_draws=0, seed=validation.SEEDS)
def find_goodput(
    servers: Sequence[MeasuredServer],
    limits: LatencyLimits,
    calibration: LoopCalibration,
    *,
    num_draws: int = 0,
    seed: int = 0,
) -> Goodput:
    """Finds the largest load of each server whose mean latencies are within limits.

    A load has at most the requests of the largest fitted one. A draw has coefficients
    of the fit's posterior, common to all servers, and the error of a fit on models that
    it did not see: factors of both latencies, common to all servers of the draw.

    Args:
      servers: servers with lengths of prompts and answers; their concurrency is not
        read.
      limits: the limits.
      calibration: the fits; all servers must be of one kind, dense or mixtures.
      num_draws: draws after the mode.
      seed: random seed.

    Raises:
      ValueError: there is no server, or there are dense models and mixtures.
    """
    kinds = {x.model.experts is not None for x in servers}
    if len(kinds) != 1:
        raise ValueError("servers must be one or more of one kind, dense or mixtures")
    fit = calibration.fit_of(servers[0])
    draws = draw_deviations(fit, num_draws, seed)
    deviations = np.concatenate([fit.mode[None], draws])
    errors = np.random.default_rng([seed, 1]).normal(size=(num_draws + 1, 2))
    errors[0] = 0.0
    max_batch = fit.sizes[1].batch
    outside = [
        outside_variance(
            fit.sizes, sizes_of_server(dataclasses.replace(x, concurrency=max_batch))
        )
        for x in servers
    ]
    spread = np.sqrt(np.array(LOOP_DISCREPANCY[kinds.pop()]) ** 2 + np.array(outside))
    # Columns of a fit are the time per token and the first token.
    factors = np.exp(errors[:, None] * spread)[..., ::-1]
    columns = np.zeros((4, len(errors), len(servers)))
    # Coefficients depend on the server by its groups only.
    groups = [
        (x.engine, x.device.name, x.is_median_step, known_groups(x, fit))
        for x in servers
    ]
    for group in dict.fromkeys(groups):
        places = [i for i, x in enumerate(groups) if x == group]
        part = [servers[i] for i in places]
        coefficients = make_loop_coefficients(part[0], fit, deviations)
        columns[..., places] = _solve(
            stack_work(part),
            jax.tree.map(jnp.float32, coefficients),
            jnp.float32(factors[:, places]),
            jnp.float32(limits),
            jnp.float32(max_batch),
        )
    return Goodput(*columns)


def predict_request_joules(
    servers: Sequence[MeasuredServer], goodput: Goodput, calibration: LoopCalibration
) -> Float[np.ndarray, " servers"]:
    """Returns the energy of a request at the largest load of the mode in J.

    Args:
      servers: the servers.
      goodput: their largest loads.
      calibration: the fits, with shares of power.

    Returns:
      Energy of prompt and answer; NaN without a fit of power or if the board power is
      unknown, and for servers without a load.
    """
    if calibration.power is None:
        return np.full(len(servers), np.nan)
    rate = goodput.requests_per_s[0]
    concurrency = np.maximum(goodput.concurrency[0], 1.0)
    loaded = [
        dataclasses.replace(x, concurrency=float(c))
        for x, c in zip(servers, concurrency, strict=True)
    ]
    load = LoopPrediction(
        median_s=np.stack([goodput.token_s[0], goodput.first_token_s[0]], axis=1),
        log_spread=np.zeros((len(servers), 2)),
        num_running=concurrency,
        mean_token_s=goodput.token_s[0],
    )
    watts = predict_watts(loaded, load, calibration.power)
    return np.where(rate > 0, watts / np.where(rate > 0, rate, 1.0), np.nan)


class _Search(NamedTuple):
    low: Float[Array, ""]
    """Logarithm of the largest load that is within the limits."""
    high: Float[Array, ""]
    middle: Float[Array, ""]
    """Logarithm of the load to try next."""
    times: Float[Array, " 2"]
    """Latencies at `low`."""
    is_met: Bool[Array, ""]
    """True if one request is within the limits."""


@jax.jit
def _solve(
    work: RowWork,
    coefficients: LoopCoefficients,
    factors: Float[Array, "draws servers 2"],
    limits: Float[Array, " 2"],
    max_batch: Float[Array, ""],
) -> Float[Array, "4 draws servers"]:
    def solve(
        work: RowWork, coefficients: LoopCoefficients, factors: Float[Array, " 2"]
    ) -> Float[Array, " 4"]:
        tokens = work.prompt_tokens + work.answer_tokens / 2 + work.state_tokens
        largest = jnp.minimum(work.kv_capacity / tokens, max_batch)
        log_largest = jnp.log(jnp.maximum(largest, 1.0))

        # One request, then the largest load, then halves of what is left.
        def move(search: _Search, step: Int[Array, ""]) -> tuple[_Search, None]:
            loaded = work._replace(concurrency=jnp.exp(search.middle))
            latency = find_loop_latency(loaded, coefficients)
            times = jnp.stack([latency.first_token_s, latency.token_s]) * factors
            is_met = jnp.all(times <= limits)
            low = jnp.where(is_met, search.middle, search.low)
            high = jnp.where(is_met, search.high, search.middle)
            moved = _Search(
                low=low,
                high=high,
                middle=jnp.where(step == 0, log_largest, (low + high) / 2),
                times=jnp.where(is_met | (step == 0), times, search.times),
                is_met=jnp.where(step == 0, is_met, search.is_met),
            )
            return moved, None

        zero = jnp.float32(0.0)
        start = _Search(zero, log_largest, zero, jnp.zeros(2), jnp.bool_(False))
        end, _ = lax.scan(move, start, jnp.arange(_NUM_BISECTIONS))
        first_s, token_s = end.times
        end_to_end_s = first_s + (work.answer_tokens - 1) * token_s
        has_room = work.kv_capacity >= work.prompt_tokens + work.answer_tokens
        batch = jnp.exp(end.low)
        rate = jnp.where(end.is_met & has_room, batch / end_to_end_s, 0.0)
        return jnp.stack([batch, rate, first_s, token_s])

    of_servers = jax.vmap(solve, in_axes=(0, None, 0))
    of_draws = jax.vmap(functools.partial(of_servers, work))
    return jnp.moveaxis(of_draws(coefficients, factors), -1, 0)
