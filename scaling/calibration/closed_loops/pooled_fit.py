"""Coefficients of servers under closed loops, with an effect of each engine and device.

Data are the logarithms of the time per token and of the time to the first token of each
row. The logarithm of a coefficient is that of `PRIOR` or `LOOP_PRIOR`, plus a deviation
that all rows share, plus an effect of the row's engine and one of its device, for the
coefficients of `EFFECTS`. Deviations and effects have normal priors, so an effect that
few rows support stays small (partial pooling). The rows of a model, device, engine and
format are a sweep, with an effect of its own on the prompts that a prompt waits for: if
answers are equally long and prompts go first, requests stay in step and wait for all,
else for few, and no column tells. Other effects of pairs fit one model's rows better
and lose twofold on the next model.

Residuals have Student's t distribution: engines run settings that a table does not
have, such as speculation. Many rows of one sweep count as `GROUP_ROWS`, and rows with
the same measured times as one. A fit that has mixtures sees no first tokens of dense
models, whose public sweeps come from another load generator.

The mode is found by Gauss-Newton steps with weights of the residuals; predictions have
the normal approximation at the mode, and a discrepancy of the model.

Source: Gelman et al. 2013, Bayesian Data Analysis, chapters 5 and 17.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from scaling.calibration.closed_loops.closed_loop import (
    LOOP_PRIOR,
    LoopCoefficients,
    find_loop_latency,
)
from scaling.calibration.closed_loops.measured_servers import MeasuredServer
from scaling.calibration.closed_loops.row_costs import RowWork, stack_work
from scaling.calibration.load_sizes import (
    LoadSizes,
    SizeRange,
    find_size_range,
    outside_variance,
)
from scaling.calibration.server_cost import PRIOR, ServerCoefficients

EFFECTS: Mapping[str, Mapping[str, float]] = {
    "engine": {
        "pace": 0.1,
        "interference": 0.2,
        "prompt_steps": 0.3,
        "first_wave": 0.3,
        "ingest_s": 1.0,
        "launch_s": 0.5,
        "host_token_s": 0.3,
    },
    "device": {"pace": 0.1},
    "statistic": {"pace": 0.1},
    "sweep": {"first_wave": 0.3},
}
"""Standard deviation of the logarithm of each effect, by kind of group."""
LOOP_NOISE = np.array([0.08, 0.25])
"""Scale of the residuals of the logarithms of time per token and of first token."""
FREEDOM = 4.0
"""Degrees of freedom of the residuals."""
GROUP_ROWS = 40
"""Rows of a sweep that count in full together."""
_FIXED = ("first_token_s", "stream_s", "delivery_lag", "pace")
"""Coefficients without a shared deviation: closed loops do not determine them."""
_BLOCK_ROWS = 256
_MAX_MOVES = 40
_LONGEST_MOVE = 1.5

PRIOR_WIDTH = 2.0
"""Factor on the spreads of the priors, which were chosen for 16 bits on H100s."""
_PRIORS = {**PRIOR, **LOOP_PRIOR}
_MEDIANS = {name: median for name, (median, _) in _PRIORS.items()}
_SPREADS = {name: PRIOR_WIDTH * spread for name, (_, spread) in _PRIORS.items()}
_SHARED = tuple(name for name in _MEDIANS if name not in _FIXED)


class LoopFit(NamedTuple):
    """Mode and covariance of the deviations and effects, all with unit prior."""

    mode: Float[np.ndarray, " parameters"]
    covariance: Float[np.ndarray, "parameters parameters"]
    groups: dict[str, tuple[str, ...]]
    """Groups of the fitted rows by kind; others have the prior of an effect."""
    models: tuple[str, ...]
    """Models of the fitted rows."""
    num_rows: int
    sizes: SizeRange
    """Smallest and largest sizes of the fitted rows."""

    def coefficients(self) -> dict[str, float]:
        """Returns the coefficients without effects at the mode."""
        shared = self.mode[: len(_SHARED)]
        values = {
            name: float(_MEDIANS[name] * np.exp(_SPREADS[name] * x))
            for name, x in zip(_SHARED, shared, strict=True)
        }
        return _MEDIANS | values

    def rows(self) -> list[tuple[str, str, str, float, float]]:
        """Returns kind, group, coefficient, value and spread of each parameter.

        The value is that at the mode, a factor for effects; the spread is the standard
        deviation of its logarithm over that of the prior.
        """
        spreads = np.sqrt(np.diag(self.covariance)).tolist()
        values = self.coefficients()
        rows = [
            ("shared", "all", name, values[name], x)
            for name, x in zip(_SHARED, spreads, strict=False)
        ]
        start = len(_SHARED)
        for kind, groups in self.groups.items():
            for name, spread in EFFECTS[kind].items():
                for place, group in enumerate(groups, start):
                    value = float(np.exp(spread * self.mode[place]))
                    rows.append((kind, group, name, value, spreads[place]))
                start += len(groups) + 1
        return rows


def fit_loops(servers: Sequence[MeasuredServer]) -> LoopFit:
    """Fits coefficients and effects to servers with a measured time per token.

    Args:
      servers: the rows; those without a first-token time count for the other only.

    Raises:
      ValueError: no row has a time per token.
    """
    servers = [x for x in servers if x.token_s is not None]
    if not servers:
        raise ValueError("servers must have at least one with a time per token")
    groups = {
        kind: tuple(sorted({_group_name(x, kind) for x in servers})) for kind in EFFECTS
    }
    rows = _stack_rows(servers, groups)
    data = _data(servers)
    is_mixture = np.array([x.model.experts is not None for x in servers])
    if is_mixture.any():
        data[~is_mixture, 1] = np.nan
    weight = np.where(np.isnan(data), 0.0, _row_weights(servers)[:, None]).ravel()
    target = np.nan_to_num(data).ravel()
    scale = np.tile(LOOP_NOISE, len(servers))

    def residuals(deviations: np.ndarray) -> np.ndarray:
        logs = _in_blocks(_log_latencies, deviations, rows)
        return (logs.ravel() - target) / scale

    def loss(deviations: np.ndarray, r: np.ndarray) -> float:
        tails = (FREEDOM + 1) / 2 * np.log1p(r**2 / FREEDOM)
        return float(weight @ tails + deviations @ deviations / 2)

    mode = np.zeros(count_parameters_of(groups))
    r = residuals(mode)
    lowest = loss(mode, r)
    damping = 1e-2
    for _ in range(_MAX_MOVES):
        jacobian = _find_slopes(mode, rows).reshape(len(r), -1) / scale[:, None]
        pull = weight * (FREEDOM + 1) / (FREEDOM + r**2)
        normal = jacobian.T @ (pull[:, None] * jacobian) + np.eye(len(mode))
        slope = jacobian.T @ (pull * r) + mode
        for _ in range(8):
            damped = normal + damping * np.diag(np.diag(normal))
            step = -np.linalg.solve(damped, slope)
            step *= min(1.0, _LONGEST_MOVE / np.abs(step).max())
            tried = residuals(mode + step)
            if (value := loss(mode + step, tried)) < lowest:
                break
            damping *= 5
        else:
            break
        is_done = lowest - value < 1e-3
        mode, r, lowest = mode + step, tried, value
        damping = max(damping / 5, 1e-6)
        if is_done:
            break
    return LoopFit(
        mode=mode,
        covariance=np.linalg.inv(normal),
        groups=groups,
        models=tuple(sorted({x.model.name for x in servers})),
        num_rows=len(servers),
        sizes=find_size_range(map(sizes_of_server, servers)),
    )


def _row_weights(servers: Sequence[MeasuredServer]) -> Float[np.ndarray, " servers"]:
    """Returns the weight of each row: repeated measurements count once."""
    repeats = Counter((x.engine, x.token_s, x.first_token_s) for x in servers)
    weight = [1 / repeats[x.engine, x.token_s, x.first_token_s] for x in servers]
    sweeps = [_group_name(x, "sweep") for x in servers]
    total = defaultdict[str, float](float)
    for sweep, x in zip(sweeps, weight, strict=True):
        total[sweep] += x
    pairs = zip(sweeps, weight, strict=True)
    return np.array([x * min(1.0, GROUP_ROWS / total[sweep]) for sweep, x in pairs])


def sizes_of_server(server: MeasuredServer) -> LoadSizes:
    """Returns the sizes of a server's load."""
    return LoadSizes(server.prompt_tokens, server.answer_tokens, server.concurrency)


class LoopPrediction(NamedTuple):
    """Predicted latencies of servers: median and standard deviation of the logarithm.

    The columns are the time per token and the time to the first token.
    """

    median_s: Float[np.ndarray, "servers 2"]
    log_spread: Float[np.ndarray, "servers 2"]
    """Standard deviation of the logarithm that the coefficients leave, and that of
    sizes outside the fitted ones, without the discrepancy of the model."""
    num_running: Float[np.ndarray, " servers"]
    """Requests that run."""
    mean_token_s: Float[np.ndarray, " servers"]
    """Mean time per token, prompts included, see `LoopLatency`."""


def predict_loops(servers: Sequence[MeasuredServer], fit: LoopFit) -> LoopPrediction:
    """Predicts the latencies of servers; their measured times are not used.

    Args:
      servers: the servers; one of an unknown engine or device has no effect of it, and
        the spread of such effects.
      fit: the fit.
    """
    rows = _stack_rows(servers, fit.groups)
    logs = _in_blocks(_log_latencies, fit.mode, rows)
    jacobian = find_log_slopes(servers, fit)
    variance = np.einsum("skp,pq,skq->sk", jacobian, fit.covariance, jacobian)
    variance += [outside_variance(fit.sizes, sizes_of_server(x)) for x in servers]
    running, mean_s = _in_blocks(_load, fit.mode, rows).T
    return LoopPrediction(np.exp(logs), np.sqrt(variance), running, mean_s)


def find_log_slopes(
    servers: Sequence[MeasuredServer], fit: LoopFit
) -> Float[np.ndarray, "servers 2 parameters"]:
    """Returns the slopes of the logarithms of both times at the mode of a fit."""
    return _find_slopes(fit.mode, _stack_rows(servers, fit.groups))


class _Rows(NamedTuple):
    work: RowWork
    places: Int[np.ndarray, "servers coefficients terms"]
    """Parameters of the logarithm of each coefficient: the shared deviation and the
    effects of the row's groups; the number of parameters if there is none."""
    spreads: Float[np.ndarray, "coefficients terms"]
    """Factor of each parameter."""
    num_parameters: int


def _group_name(server: MeasuredServer, kind: str) -> str:
    return {
        "engine": server.engine,
        "device": server.device.name,
        "statistic": "median step" if server.is_median_step else "time per token",
        "sweep": "/".join((*server.group, server.weight_format)),
    }[kind]


def _stack_rows(
    servers: Sequence[MeasuredServer], groups: Mapping[str, tuple[str, ...]]
) -> _Rows:
    num = count_parameters_of(groups)
    names = [*_MEDIANS]
    places = np.full((len(servers), len(names), 1 + len(EFFECTS)), num)
    spreads = np.zeros(places.shape[1:])
    for at, name in enumerate(_SHARED):
        places[:, names.index(name), 0] = at
        spreads[names.index(name), 0] = _SPREADS[name]
    start = len(_SHARED)
    for term, (kind, known) in enumerate(groups.items(), 1):
        indices = {group: at for at, group in enumerate(known)}
        group_names = [_group_name(server, kind) for server in servers]
        at = np.array([indices.get(name, len(known)) for name in group_names])
        for name, spread in EFFECTS[kind].items():
            places[:, names.index(name), term] = start + at
            spreads[names.index(name), term] = spread
            start += len(known) + 1
    return _Rows(stack_work(servers), places, spreads, num)


def known_groups(server: MeasuredServer, fit: LoopFit) -> tuple[str | None, ...]:
    """Returns the groups of a server whose effects a fit has, None for unknown ones."""
    names = [(_group_name(server, kind), known) for kind, known in fit.groups.items()]
    return tuple(name if name in known else None for name, known in names)


def count_parameters_of(groups: Mapping[str, tuple[str, ...]]) -> int:
    """Returns the number of deviations and effects of a fit with these groups."""
    effects = (len(EFFECTS[kind]) * (len(x) + 1) for kind, x in groups.items())
    return len(_SHARED) + sum(effects)


def draw_loop_coefficients(
    server: MeasuredServer, fit: LoopFit, *, num: int, seed: int = 0
) -> LoopCoefficients:
    """Draws coefficients of a server, effects of its engine and device included.

    Args:
      server: the server; its load and its measured times are not used.
      fit: the fit.
      num: draws.
      seed: random seed.

    Returns:
      Coefficients with a leading axis of draws.
    """
    return make_loop_coefficients(server, fit, draw_deviations(fit, num, seed))


def draw_deviations(
    fit: LoopFit, num: int, seed: int
) -> Float[np.ndarray, "draws parameters"]:
    """Draws deviations and effects from the normal approximation at the mode."""
    rng = np.random.default_rng(seed)
    factor = np.linalg.cholesky(fit.covariance)
    return fit.mode + rng.normal(size=(num, len(fit.mode))) @ factor.T


def make_loop_coefficients(
    server: MeasuredServer,
    fit: LoopFit,
    deviations: Float[np.ndarray, "draws parameters"],
) -> LoopCoefficients:
    """Returns a server's coefficients, effects of its engine and device included."""
    rows = _stack_rows([server], fit.groups)
    logs = [_find_logs(x, rows)[0] for x in deviations]
    return jax.tree.map(np.asarray, _make_coefficients(jnp.float32(logs)))


def _data(servers: Sequence[MeasuredServer]) -> Float[np.ndarray, "servers 2"]:
    pairs = [(x.token_s or np.nan, x.first_token_s or np.nan) for x in servers]
    return np.log(pairs)


def _find_logs(
    deviations: Float[np.ndarray, " parameters"], rows: _Rows
) -> Float[np.ndarray, "servers coefficients"]:
    """Returns the logarithms of the coefficients of each row."""
    padded = np.append(deviations, 0.0)
    medians = np.log([*_MEDIANS.values()])
    return medians + np.sum(padded[rows.places] * rows.spreads, axis=2)


def _find_slopes(
    deviations: Float[np.ndarray, " parameters"], rows: _Rows
) -> Float[np.ndarray, "servers 2 parameters"]:
    """Returns the slopes of the logarithms of both times in the parameters."""
    slopes = _in_blocks(_log_slopes, deviations, rows)
    jacobian = np.zeros((len(slopes), 2, rows.num_parameters + 1))
    row = np.arange(len(slopes))
    for at, terms in enumerate(rows.spreads):
        for term in np.flatnonzero(terms):
            place = rows.places[:, at, term]
            jacobian[row, :, place] += slopes[:, :, at] * terms[term]
    return jacobian[:, :, :-1]


def _make_coefficients(logs: Float[Array, "*draws coefficients"]) -> LoopCoefficients:
    columns = jnp.moveaxis(jnp.exp(logs), -1, 0)
    values = dict(zip(_MEDIANS, columns, strict=True))
    server = {name: values.pop(name) for name in ServerCoefficients._fields}
    return LoopCoefficients(server=ServerCoefficients(**server), **values)


def _in_blocks(
    function: Callable[..., Array],
    deviations: Float[np.ndarray, " parameters"],
    rows: _Rows,
) -> np.ndarray:
    """Maps a compiled function over blocks of one size, so that it compiles once."""
    logs = _find_logs(deviations, rows).astype(np.float32)
    num = len(logs)
    padded = np.minimum(np.arange(-(-num // _BLOCK_ROWS) * _BLOCK_ROWS), num - 1)
    parts = []
    for places in np.split(padded, len(padded) // _BLOCK_ROWS):
        take = functools.partial(np.take, indices=places, axis=0)
        part = function(*jax.tree.map(take, (logs, rows.work)))
        parts.append(np.asarray(part, np.float64))
    return np.concatenate(parts)[:num]


def _row_logs(logs: Float[Array, " coefficients"], work: RowWork) -> Float[Array, "2"]:
    latency = find_loop_latency(work, _make_coefficients(logs))
    return jnp.log(jnp.stack([latency.token_s, latency.first_token_s]))


def _row_load(logs: Float[Array, " coefficients"], work: RowWork) -> Float[Array, "2"]:
    latency = find_loop_latency(work, _make_coefficients(logs))
    return jnp.stack([latency.num_running, latency.mean_token_s])


_log_latencies = jax.jit(jax.vmap(_row_logs))
_log_slopes = jax.jit(jax.vmap(jax.jacfwd(_row_logs)))
_load = jax.jit(jax.vmap(_row_load))
