"""Logs of a server's requests: the coefficients that fit them, and predicted times.

A log has a row for each request, in any order, with times in s from any origin:

    arrival_s, first_token_s, last_token_s     as the client or the server saw them
    prompt_tokens, answer_tokens               tokens of prompt and answer

Further columns are ignored. The detailed results of vLLM's benchmark (`vllm bench serve
--save-result --save-detailed`) and of SGLang's (`sglang.bench_serving --output-file F
--output-details`) are logs as well. SGLang's has no arrivals: they follow from an
infinite request rate, with or without `--max-concurrency`, and from no other. Every
request is simulated with the same arrival, so the simulated queue can be compared with
the measured one, request by request.
"""

import heapq
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation
from jaxkv.files import RawRow, parse_json, read_table, read_text
from jaxkv.scheduling import Policy
from scaling.calibration.load_sizes import LoadSizes
from scaling.calibration.measurements import LONGEST_STEP_S, RowCells
from scaling.calibration.posterior import ServerPosterior
from scaling.calibration.server_cost import PRIOR, draw_coefficients
from scaling.calibration.server_runs import ServerRun, simulate_server
from scaling.calibration.servers import ServerLoad, ServerSetup, make_server_load

REQUEST_NOISE = np.array([0.03, 0.1])
"""Standard deviation of the logarithms of a request's end-to-end and first-token time.
Assumed, not fitted."""
_LOG_COLUMNS = (
    *("arrival_s", "prompt_tokens", "answer_tokens"),
    *("first_token_s", "last_token_s"),
)
_SLOPE_WIDTH = 1.5
"""Width of the differences that give slopes, in standard deviations of the prior. Times
are steps of a coefficient, since it changes which requests share a step: differences of
0.1 end at a fit that is hardly better than the prior."""
_STEP_FACTORS = 2.0 ** np.arange(1, -7, -1)
"""Lengths of a step that are tried, relative to that of Gauss and Newton."""
_MAX_STEPS = 10


class RequestLog(NamedTuple):
    """Requests of a server in order of arrival; times in s after the first arrival."""

    arrival_s: Float[np.ndarray, " requests"]
    prompt_tokens: Int[np.ndarray, " requests"]
    answer_tokens: Int[np.ndarray, " requests"]
    first_token_s: Float[np.ndarray, " requests"]
    last_token_s: Float[np.ndarray, " requests"]
    row: Int[np.ndarray, " requests"]
    """Number of each request's row in the file, from 1."""

    @property
    def latencies_s(self) -> Float[np.ndarray, "2 requests"]:
        """End-to-end and first-token time of each request."""
        return np.stack([self.last_token_s, self.first_token_s]) - self.arrival_s

    def take(self, num: int) -> "RequestLog":
        """Returns the first `num` requests."""
        return RequestLog(*(x[:num] for x in self))


def read_request_log(path: str | os.PathLike[str]) -> RequestLog:
    """Reads a log of requests: a table (CSV, JSON lines, ...) or a benchmark's result.

    Raises:
      ValueError: the file cannot be read, lacks a column or has fewer than 2 requests,
        a request failed, a cell is not a number in range, or times are not in s. One
        line with the file and the row.
    """
    path = validation.path("path", path)
    rows = _read_benchmark(path) if path.suffix in (".json", ".jsonl") else None
    if rows is None:
        table = read_table(path)
        absent = [name for name in _LOG_COLUMNS if name not in table.names]
        if absent:
            raise ValueError(
                f"{path}: needs {', '.join(absent)}; a log of requests has "
                f"{', '.join(_LOG_COLUMNS)}"
            )
        rows = table.rows
    if len(rows) < 2:
        raise ValueError(f"{path}: {len(rows)} requests must be at least 2")
    numbers = []
    for row in rows:
        cells = RowCells(f"{path}: {row.place}", row.cells)
        arrival_s = cells.number("arrival_s", low=-np.inf)
        first_s = cells.number("first_token_s", low=arrival_s)
        last_s = cells.number("last_token_s", low=first_s)
        answer = cells.integer("answer_tokens")
        if answer > 1 and last_s - first_s > LONGEST_STEP_S * (answer - 1):
            raise ValueError(
                f"{path}: {row.place}: {(last_s - first_s) / (answer - 1):,.4g} s per "
                f"token must be at most {LONGEST_STEP_S:g}; times must be in s"
            )
        prompt = cells.integer("prompt_tokens")
        numbers.append((arrival_s, prompt, answer, first_s, last_s, row.number))
    numbers.sort(key=lambda x: x[0])  # requests of one time keep their order
    arrival, prompt, answer, first, last, number = map(
        np.array, zip(*numbers, strict=True)
    )
    begin_s = arrival[0]
    return RequestLog(
        arrival - begin_s, prompt, answer, first - begin_s, last - begin_s, number
    )


def _read_benchmark(path: Path) -> list[RawRow] | None:
    """Reads the result of a benchmark; None if the file has another form."""
    text = read_text(path)
    lines = [text] if path.suffix == ".json" else [x for x in text.split("\n") if x]
    data = parse_json(lines[0], path) if lines else None
    if not isinstance(data, dict) or "ttfts" not in data:
        return None
    if len(lines) > 1:
        raise ValueError(
            f"{path}: has {len(lines)} results of a benchmark; a log has one"
        )
    names = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    columns = [data.get(name) for name in names]
    lists = [x for x in columns if isinstance(x, list)]
    if len(lists) < len(names) or len({len(x) for x in lists}) > 1:
        raise ValueError(
            f"{path}: needs {', '.join(names)} of equal lengths, as of vllm bench "
            "serve --save-result --save-detailed, or of sglang.bench_serving "
            "--output-file FILE --output-details"
        )
    tokens = []
    spans = []
    for number, row in enumerate(zip(*lists, strict=True), 1):
        prompt, answer, first, gaps, error = row
        if error:
            raise ValueError(f"{path}: request {number} failed: {error!s:.80}")
        try:
            spans.append((float(first), float(first) + float(sum(gaps))))
        except (TypeError, ValueError):
            raise ValueError(
                f"{path}: request {number}: ttfts and itls must be numbers"
            ) from None
        tokens.append((prompt, answer))
    starts = data.get("start_times")
    if starts is None:
        starts = _find_starts(data, [last for _, last in spans], path)
    if not isinstance(starts, list) or len(starts) != len(spans):
        raise ValueError(f"{path}: start_times must have {len(spans)} numbers")
    rows = []
    for number, start in enumerate(starts, 1):
        first_s, last_s = spans[number - 1]
        if not isinstance(start, int | float):
            raise ValueError(f"{path}: request {number}: start_times must be numbers")
        numbers = (start, *tokens[number - 1], start + first_s, start + last_s)
        rows.append(RawRow(number, 0, dict(zip(_LOG_COLUMNS, numbers, strict=True))))
    return rows


def _find_starts(
    data: dict[str, object], spans_s: Sequence[float], path: Path
) -> list[float]:
    """Returns the starts of a benchmark without arrivals, from the ends of requests.

    All requests are sent at once, or each when the number of others falls below the
    largest concurrency, in the order of the file.

    Raises:
      ValueError: requests were sent at random times.
    """
    rate = data.get("request_rate")
    limit = data.get("max_concurrency")
    if rate != math.inf:
        raise ValueError(
            f"{path}: has no start_times, and request_rate={rate!r} sends requests at "
            "times that the file does not have; --request-rate inf is read, with or "
            "without --max-concurrency"
        )
    if limit is None:
        return [0.0] * len(spans_s)
    if type(limit) is not int or limit < 1:
        raise ValueError(f"{path}: max_concurrency={limit!r} must be at least 1")
    ends: list[float] = []
    starts = []
    for span_s in spans_s:
        start_s = heapq.heappop(ends) if len(ends) == limit else 0.0
        heapq.heappush(ends, start_s + span_s)
        starts.append(start_s)
    return starts


def make_log_load(log: RequestLog, setup: ServerSetup) -> ServerLoad:
    """Makes the load of a log; no prompt is cached, and every request is measured."""
    return make_server_load(
        log.arrival_s,
        log.prompt_tokens,
        log.answer_tokens,
        prefix_tokens=np.zeros_like(log.prompt_tokens),
        block_size=setup.block_size,
        warm_up_s=0.0,
        window_s=float(log.arrival_s[-1]) + 1.0,
    )


def latencies_of(run: ServerRun) -> Float[np.ndarray, "draws 2 requests"]:
    """Returns the simulated end-to-end and first-token time of each request in s."""
    latencies = run.latencies()
    return np.stack([latencies.end_to_end_s, latencies.first_token_s], axis=1)


@validation.checks_numbers(num_fitted=2, num_draws=2, seed=validation.SEEDS)
def fit_request_log(
    log: RequestLog,
    setup: ServerSetup,
    *,
    num_fitted: int | None = None,
    policy: Policy | None = None,
    num_draws: int = 32,
    seed: int = 0,
) -> ServerPosterior:
    """Fits the coefficients of a server to the requests of a log.

    The mode maximises the prior times a normal density of the logarithms of all times,
    with `REQUEST_NOISE`, by at most 10 steps of Gauss and Newton through the simulator.
    Draws are from the normal approximation there.

    Args:
      log: the requests.
      setup: the server.
      num_fitted: number of the first requests, at least 2, whose times are fitted; None
        means all. Later ones are served as well, and their times are not read.
      policy: scheduling policy; None is vLLM's.
      num_draws: draws of the posterior, at least 2.
      seed: random seed of the draws.

    Returns:
      The posterior, with the requests as one stage of its model.
    """
    num_fitted = len(log.row) if num_fitted is None else num_fitted
    fitted_log = log.take(num_fitted)
    measured = fitted_log.latencies_s
    data = np.log(measured)
    load = make_log_load(log, setup)
    num = len(PRIOR)
    size = num + 1  # of each simulation, so that all share a program

    def simulate_logs(deviations: np.ndarray) -> Float[np.ndarray, "draws 2 requests"]:
        padded = np.resize(deviations, (size, num))
        (run,) = simulate_server(
            setup,
            [load],
            draw_coefficients(padded),
            policy=policy,
            num_slots=setup.max_num_seqs,
        )
        return np.log(latencies_of(run))[: len(deviations), :, :num_fitted]

    def whiten(residuals: np.ndarray) -> np.ndarray:
        scaled = residuals / REQUEST_NOISE[:, None]
        return scaled.reshape(len(residuals), -1)

    mode = np.zeros(num)
    slopes = np.zeros((0, num))
    for _ in range(_MAX_STEPS):
        points = np.concatenate([mode[None], mode + _SLOPE_WIDTH * np.eye(num)])
        times = simulate_logs(points)
        slopes = whiten(times[1:] - times[:1]).T / _SLOPE_WIDTH
        errors = np.concatenate([whiten(data - times[:1])[0], -mode])
        matrix = np.concatenate([slopes, np.eye(num)])
        step, *_ = np.linalg.lstsq(matrix, errors, rcond=None)
        trials = mode + _STEP_FACTORS[:, None] * step
        misfits = np.sum(whiten(data - simulate_logs(trials)) ** 2, axis=1)
        misfits += np.sum(trials**2, axis=1)
        if misfits.min() >= np.sum(errors**2) - 1e-2:
            break
        mode = trials[misfits.argmin()]
    factor = np.linalg.cholesky(np.linalg.inv(slopes.T @ slopes + np.eye(num)))
    normal = np.random.default_rng(seed).normal(size=(num_draws, num))
    deviations = mode + normal @ factor.T
    # Residuals of the mean end-to-end and the median first-token time, as of stages.
    fitted = np.exp(simulate_logs(mode[None])[0])
    residual = np.log(
        [
            measured[0].mean() / fitted[0].mean(),
            np.median(measured[1]) / np.median(fitted[1]),
        ]
    )
    # Lengths without the smallest and the largest tenth; batches up to the largest.
    prompts, answers = (
        np.percentile(tokens, (10, 90))
        for tokens in (fitted_log.prompt_tokens, fitted_log.answer_tokens)
    )
    ended = np.searchsorted(np.sort(fitted_log.last_token_s), fitted_log.arrival_s)
    batch = min(np.max(np.arange(num_fitted) - ended) + 1, setup.max_num_seqs)
    return ServerPosterior(
        deviations=deviations,
        residuals={setup.model.name: np.tile(residual, (num_draws, 1))},
        num_stages={setup.model.name: 1},
        stages=(f"{num_fitted} requests",),
        mode=mode,
        corrections=np.zeros((1, 2)),
        num_effective=float(num_draws),
        devices=(setup.device.name,),
        fitted_sizes=(
            LoadSizes(float(prompts[0]), float(answers[0]), 1.0),
            LoadSizes(float(prompts[1]), float(answers[1]), float(batch)),
        ),
    )


def kolmogorov_distance(
    first: Float[np.ndarray, " m"], second: Float[np.ndarray, " n"]
) -> float:
    """Returns the largest difference of two empirical distribution functions."""
    points = np.concatenate([first, second])
    shares = [
        np.searchsorted(np.sort(x), points, side="right") / len(x)
        for x in (first, second)
    ]
    return float(np.max(np.abs(shares[0] - shares[1])))
