"""Power of a server: idle, and shares that memory and products add.

A device draws a share of its board power: a constant, plus the used share of its memory
bandwidth, plus the used share of its peak of products. The shares used follow from the
counts of the server and a predicted time per token, so the configuration alone gives
watts, and joules per token.

Source: You et al. 2023, Zeus, NSDI, section 2 (power of a GPU by load).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize

from jaxkv import validation
from scaling.calibration.closed_loops.measured_servers import MeasuredServer
from scaling.calibration.closed_loops.pooled_fit import LoopPrediction
from scaling.calibration.closed_loops.row_costs import count_server
from scaling.calibration.server_cost import ServerCoefficients
from scaling.calibration.server_runs import ServerRun
from scaling.calibration.servers import ServerSetup
from scaling.costs import Device

JOULES_PER_KWH = 3.6e6
POWER_NOISE = 0.1
"""Relative error of a row above which its weight in the fit falls."""
_REWEIGHTINGS = 8


class PowerShares(NamedTuple):
    """Coefficients of a device's power, as shares of its board power."""

    idle: float
    """Power of a device that waits for memory and products all the time."""
    memory: float
    """Power that a full memory bandwidth adds."""
    products: float
    """Power that the peak of products adds."""


PUBLISHED_POWER = PowerShares(idle=0.5462, memory=0.1907, products=1.4434)
"""Fit to the 308 rows of ML.ENERGY with watts and a known board power, by `jaxkv
calibrate aic_servers.csv mlenergy_servers.csv`: vLLM servers on H100 and B200."""


class RunEnergy(NamedTuple):
    """Power and energy of a simulated run, for each draw."""

    watts: Float[np.ndarray, " draws"]
    """Mean power of all devices after the warm-up in W."""
    token_joules: Float[np.ndarray, " draws"]
    """Energy of an answer's token in J, prompts included."""


def find_run_energy(
    setup: ServerSetup, run: ServerRun, shares: PowerShares = PUBLISHED_POWER
) -> RunEnergy:
    """Returns power and energy of a run; NaN if the board power is unknown.

    A device without work has the power of `PowerShares.idle`, which is too much where a
    server is idle for long: the fitted servers never were.

    Args:
      setup: the server.
      run: a run of it.
      shares: the coefficients.
    """
    cost = setup.cost(ServerCoefficients(*(1.0 for _ in ServerCoefficients._fields)))
    counts = cost.counts
    totals = run.totals
    steps = np.maximum(totals.steps, 1)
    rows = totals.decoded + totals.read
    met = 1 - (1 - float(counts.expert_share)) ** (rows / steps)
    kv_bytes = float(counts.kv_bytes * cost.num_layers * cost.kv_copies)
    kv_tokens = run.used_share * setup.num_kv_blocks * setup.block_size
    num_bytes = steps * (
        float(counts.weight_bytes)
        + float(counts.expert_bytes) * met
        + kv_tokens * kv_bytes
    )
    flops = rows * float(counts.flops_per_token)
    flops = flops + totals.drawn * float(counts.flops_per_logit)
    last_s = np.nanmax(run.finish_s, axis=1) - run.load.warm_up_s
    span_s = np.maximum(last_s, totals.busy_s)
    used = shares.memory * num_bytes / float(counts.bytes_per_s)
    used = used + shares.products * flops / float(counts.flops_per_s)
    board = setup.tensor_parallel * (setup.device.board_watts or np.nan)
    watts = board * np.minimum(shares.idle + used / span_s, 1.0)
    return RunEnergy(watts, watts * span_s / np.maximum(totals.drawn, 1))


def fit_power(servers: Sequence[MeasuredServer], load: LoopPrediction) -> PowerShares:
    """Fits the shares to measured watts, by relative error, with heavy tails.

    Args:
      servers: servers with watts, on devices whose board power is known.
      load: predicted time per token, and requests that run.
    """
    shares = [
        (x.watts or np.nan) / x.num_devices / x.device.board_watts for x in servers
    ]
    design = find_used_shares(servers, load) / np.array(shares)[:, None]
    weight = np.ones(len(servers))
    values = np.zeros(design.shape[1])
    for _ in range(_REWEIGHTINGS):
        values, _ = optimize.nnls(design * weight[:, None], weight)
        weight = 1 / np.hypot(1.0, (design @ values - 1) / POWER_NOISE)
    return PowerShares(*map(float, values))


def predict_watts(
    servers: Sequence[MeasuredServer],
    load: LoopPrediction,
    shares: PowerShares,
) -> Float[np.ndarray, " servers"]:
    """Returns the power of all devices in W, at most their board power.

    Args:
      servers: the servers; the power is NaN if the board power is unknown.
      load: predicted time per token, and requests that run.
      shares: the coefficients.
    """
    board = [x.num_devices * (x.device.board_watts or np.nan) for x in servers]
    used = find_used_shares(servers, load) @ np.array(shares)
    return np.array(board) * np.minimum(used, 1.0)


@validation.checks_numbers(mfu="(0, 1]")
def predict_training_watts(
    device: Device, mfu: float, shares: PowerShares = PUBLISHED_POWER
) -> float:
    """Returns the power of a device in training in W; 0 if its board power is unknown.

    The shares are those of servers: idle power, and that of products at the MFU. Reads
    and writes of memory are not counted, so it is a lower bound, at most the board
    power.

    Args:
      device: accelerator.
      mfu: model FLOPs utilization, in (0, 1].
      shares: the coefficients.
    """
    return device.board_watts * min(shares.idle + shares.products * mfu, 1.0)


def find_used_shares(
    servers: Sequence[MeasuredServer], load: LoopPrediction
) -> Float[np.ndarray, "servers 3"]:
    """Returns 1, and the used shares of memory bandwidth and peak of products.

    Args:
      servers: the servers.
      load: predicted time per token, and requests that run.
    """
    rows = []
    numbers = zip(servers, load.mean_token_s, load.num_running, strict=True)
    for server, seconds, decodes in numbers:
        work = count_server(server)
        counts = work.counts
        context = server.prompt_tokens + server.answer_tokens / 2
        met = 1 - (1 - float(counts.expert_share)) ** decodes
        kv_bytes = float(counts.kv_bytes * work.num_layers * work.kv_copies)
        num_bytes = float(counts.weight_bytes + counts.expert_bytes * met)
        num_bytes += decodes * (context + 2 * float(work.state_tokens)) * kv_bytes
        tokens = decodes * (1 + server.prompt_tokens / server.answer_tokens)
        flops = tokens * float(counts.flops_per_token + work.expert_flops)
        flops += decodes * float(counts.flops_per_logit)
        bandwidth = num_bytes / seconds / float(counts.bytes_per_s)
        products = flops / seconds / float(counts.flops_per_s)
        rows.append((1.0, bandwidth, products))
    return np.array(rows)
