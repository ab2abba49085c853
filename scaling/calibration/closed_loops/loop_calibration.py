"""Fits of dense models and of mixtures, and predictions with intervals.

Dense models are predicted by a fit to rows of dense models, and mixtures by a fit to
all rows: shared coefficients gain from dense rows, but those of mixtures, whose engines
have more settings that tables lack, would widen and bias predictions of dense models.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scaling.calibration.closed_loops.closed_loop import (
    LOOP_PRIOR,
    LoopCoefficients,
    find_loop_latency,
)
from scaling.calibration.closed_loops.measured_servers import MeasuredServer
from scaling.calibration.closed_loops.pooled_fit import (
    LOOP_NOISE,
    LoopFit,
    LoopPrediction,
    find_log_slopes,
    fit_loops,
    predict_loops,
)
from scaling.calibration.closed_loops.power import (
    PowerShares,
    fit_power,
    predict_watts,
)
from scaling.calibration.closed_loops.row_costs import RowWork, stack_work
from scaling.calibration.closed_loops.token_tails import (
    TAIL_LEVELS,
    TokenTail,
    fit_token_tail,
    predict_token_tails,
)
from scaling.calibration.server_cost import ServerCoefficients

LOOP_LATENCIES = ("time per token", "first token")
"""Names of the predicted latencies, the columns of a prediction."""
LOOP_DISCREPANCY: Mapping[bool, tuple[float, float]] = {
    False: (0.15, 0.8),
    True: (0.25, 0.6),
}
"""Standard deviation of the logarithm of each latency that a fit leaves on a model it
did not see; by whether the model is a mixture. Calibrated: 90 % of the errors of public
rows whose model was left out are within 1.645 of it."""
INTERVAL_HALF = NormalDist().inv_cdf(0.95)
"""Standard deviations from the median to either end of an interval of 90 %."""
POWER_DISCREPANCY = 0.2
ENERGY_DISCREPANCY = 0.25
"""Standard deviation of the logarithms of power and of energy per token, for models
that a fit did not see. Calibrated as `LOOP_DISCREPANCY`."""


TAIL_DISCREPANCY = (0.31, 0.33, 0.47)
"""Standard deviation of the logarithms of the percentiles of `TAIL_LEVELS`. Calibrated
as `LOOP_DISCREPANCY`."""


class LoopCalibration(NamedTuple):
    """Fits by kind of model; None where no row determines one."""

    dense: LoopFit | None
    mixture: LoopFit | None
    power: PowerShares | None
    """Shares of the board power; None if no row has watts."""
    tail: TokenTail | None = None
    """Tail of the time between tokens; None if no row has percentiles."""

    def fit_of(self, server: MeasuredServer) -> LoopFit:
        """Returns the fit for a server; that of the other kind if there is no own.

        Raises:
          ValueError: there is no fit.
        """
        fits = (self.dense, self.mixture)
        first, second = fits if server.model.experts is None else fits[::-1]
        if (fit := first or second) is None:
            raise ValueError(f"{server.name}: no fit of dense models or mixtures")
        return fit


class ServerPrediction(NamedTuple):
    """Predicted latencies of servers in s; columns are those of `LOOP_LATENCIES`."""

    low_s: Float[np.ndarray, "servers 2"]
    """5 % quantile."""
    median_s: Float[np.ndarray, "servers 2"]
    high_s: Float[np.ndarray, "servers 2"]
    """95 % quantile."""
    num_running: Float[np.ndarray, " servers"]
    """Requests that run; fewer than the concurrency if memory is short."""
    mean_token_s: Float[np.ndarray, " servers"]
    """Mean time per token in s, with the steps that feed prompts."""
    watts: Float[np.ndarray, " servers"]
    """Power of all devices in W; NaN without a fit of power, or if the board power of
    the device is unknown."""
    token_joules: Float[np.ndarray, " servers"]
    """Energy of an answer's token in J, prompts included; NaN as for `watts`."""
    tail_s: Float[np.ndarray, "servers 3"]
    """Percentiles of the time between tokens in s; NaN without a fit of them, and for
    servers without `is_median_step`."""


def calibrate_loops(
    servers: Sequence[MeasuredServer],
    *,
    has_dense: bool = True,
    has_mixtures: bool = True,
) -> LoopCalibration:
    """Fits dense models and mixtures.

    Args:
      servers: rows with a time per token.
      has_dense: False to fit no dense models.
      has_mixtures: False to fit no mixtures.

    Raises:
      ValueError: no row has a time per token.
    """
    if not any(x.token_s for x in servers):
        raise ValueError("servers must have at least one with a time per token")
    measured = [x for x in servers if x.token_s is not None]
    dense = [x for x in measured if x.model.experts is None]
    fits_dense = bool(dense) and has_dense
    fits_mixtures = len(dense) < len(measured) and has_mixtures
    calibration = LoopCalibration(
        dense=fit_loops(dense) if fits_dense else None,
        # Rows of one kind predict the other, too.
        mixture=fit_loops(measured) if fits_mixtures or not fits_dense else None,
        power=None,
    )
    tailed = [x for x in measured if x.token_tail_s is not None]
    if tailed:
        tail = fit_token_tail(tailed, _predict(tailed, calibration))
        calibration = calibration._replace(tail=tail)
    powered = [x for x in measured if x.watts is not None and x.device.board_watts]
    if powered:
        power = fit_power(powered, _predict(powered, calibration))
        calibration = calibration._replace(power=power)
    return calibration


def predict_servers(
    servers: Sequence[MeasuredServer], calibration: LoopCalibration
) -> ServerPrediction:
    """Predicts servers of any kind; their measured numbers are not used.

    Args:
      servers: the servers.
      calibration: the fits.

    Raises:
      ValueError: there is no fit.
    """
    predicted = _predict(servers, calibration)
    discrepancy = [LOOP_DISCREPANCY[x.model.experts is not None] for x in servers]
    factor = np.exp(INTERVAL_HALF * np.hypot(predicted.log_spread, discrepancy))
    watts = np.full(len(servers), np.nan)
    if calibration.power is not None:
        watts = predict_watts(servers, predicted, calibration.power)
    tail_s = np.full((len(servers), len(TAIL_LEVELS)), np.nan)
    is_median = np.array([x.is_median_step for x in servers])
    if calibration.tail is not None and is_median.any():
        steps = [x for x in servers if x.is_median_step]
        load = LoopPrediction(*(x[is_median] for x in predicted))
        tail_s[is_median] = predict_token_tails(steps, load, calibration.tail)
    median = predicted.median_s
    return ServerPrediction(
        low_s=median / factor,
        median_s=median,
        high_s=median * factor,
        num_running=predicted.num_running,
        mean_token_s=predicted.mean_token_s,
        watts=watts,
        token_joules=watts * predicted.mean_token_s / predicted.num_running,
        tail_s=tail_s,
    )


ROOFLINE_LOOP = LoopCoefficients(
    server=ServerCoefficients(
        **{
            name: 0.0 if name.endswith("_s") or name == "delivery_lag" else 1.0
            for name in ServerCoefficients._fields
        }
    )._replace(overlap=64.0),
    **{
        name: 0.0 if name == "first_wave" or name.endswith("_s") else 1.0
        for name in LOOP_PRIOR
    },
)
"""All rates of the data sheet, the larger of compute and reads, and no overhead; all
prompts interrupt all answers, and none waits for another."""


def predict_roofline(
    servers: Sequence[MeasuredServer],
) -> Float[np.ndarray, "servers 2"]:
    """Returns the latencies of servers from data sheets, without a fit, in s."""
    coefficients = jax.tree.map(jnp.float32, ROOFLINE_LOOP)

    def times(work: RowWork) -> Float[Array, " 2"]:
        latency = find_loop_latency(work, coefficients)
        return jnp.stack([latency.token_s, latency.first_token_s])

    return np.asarray(jax.jit(jax.vmap(times))(stack_work(servers)), np.float64)


class RowGain(NamedTuple):
    """A server, and what measuring it does to the intervals of another."""

    server: MeasuredServer
    widths: tuple[float, float]
    """Widths of the intervals of `LOOP_LATENCIES`, over those before."""


def rank_rows(
    target: MeasuredServer,
    candidates: Sequence[MeasuredServer],
    calibration: LoopCalibration,
) -> list[RowGain]:
    """Ranks servers of the target's model by how much measuring one would narrow it.

    Logarithms are taken as jointly normal: coefficients and the discrepancy of the
    model are common, the noise of a row is not (as in `rank_measurements`).

    Args:
      target: the server that is predicted.
      candidates: servers of the same model that can be measured.
      calibration: the fits.

    Returns:
      The servers, the narrowest intervals first.
    """
    fit = calibration.fit_of(target)
    rows = [target, *candidates]
    slopes = find_log_slopes(rows, fit)
    common = np.einsum("kp,pq,skq->sk", slopes[0], fit.covariance, slopes)
    discrepancy = np.array(LOOP_DISCREPANCY[target.model.experts is not None]) ** 2
    variance = predict_loops(rows, fit).log_spread ** 2 + discrepancy
    left = (common[1:] + discrepancy) ** 2 / (variance[1:] + LOOP_NOISE**2)
    widths = np.sqrt(np.maximum(1 - left / variance[0], 0.0))
    gains = [
        RowGain(x, (float(a), float(b)))
        for x, (a, b) in zip(candidates, widths, strict=True)
    ]
    return sorted(
        gains,
        key=lambda gain: (round(math.prod(gain.widths), 2), gain.server.concurrency),
    )


def _predict(
    servers: Sequence[MeasuredServer], calibration: LoopCalibration
) -> LoopPrediction:
    """Predicts each server with the fit of its kind."""
    fits = [calibration.fit_of(x) for x in servers]
    arrays: list[np.ndarray] = []
    for fit in {id(x): x for x in fits}.values():
        places = [i for i, x in enumerate(fits) if x is fit]
        part = predict_loops([servers[i] for i in places], fit)
        if not arrays:
            arrays = [np.zeros((len(servers), *x.shape[1:])) for x in part]
        for array, values in zip(arrays, part, strict=True):
            array[places] = values
    return LoopPrediction(*arrays)
