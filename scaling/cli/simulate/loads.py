"""Loads of a server: drawn from the options, or read from a trace."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxkv import clock
from jaxkv.workloads import (
    ALPACA,
    SHAREGPT,
    Fixed,
    Lengths,
    Pair,
    Workload,
    num_requests_for,
    read_recording,
)
from scaling.calibration import (
    WINDOW_S,
    RequestLog,
    ServerLoad,
    ServerPosterior,
    ServerSetup,
    SteadyLoad,
    choose_warm_up_s,
    draw_arrivals,
    draw_coefficients,
    find_steady_state,
    load_duration_s,
    make_log_load,
    make_server_load,
    read_request_log,
)
from scaling.cli.simulate.options import SimulateOptions, parse_sweep, parse_tokens

NUM_REQUESTS = 200
"""Requests in the window without `--num-requests` and `--duration`, at least."""

_LENGTH_PAIRS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}


class Loads(NamedTuple):
    """The loads of a case, at one rate or several."""

    loads: tuple[ServerLoad, ...]
    rates: tuple[float, ...]
    """Requests per second of each load."""
    num_slots: int
    """Sequences that run at a time in the steady state of the last load, rounded
    up to a power of 2."""
    doubts: tuple[str, ...] = ()
    """Doubts about the rows of a trace."""
    session: Int[np.ndarray, " requests"] | None = None
    """Session of each request; None without sessions."""


def draw_loads(
    options: SimulateOptions, setup: ServerSetup, posterior: ServerPosterior
) -> Loads:
    """Draws the loads of all rates: the same requests, arriving faster."""
    rates = parse_sweep(options.sweep) or (options.rate or math.nan,)
    pair = _length_pair(options, setup)
    prefix = options.prefix_tokens
    block = options.block_size
    cached = prefix // block * block if options.prefix_caching else 0
    prompt = pair.prompt.mean
    answer = pair.output.mean
    warm_up_s, num_slots = _expect(
        options, setup, posterior, rates[-1], (prefix + prompt, cached, answer)
    )
    windows = [_window_s(options, rate) for rate in rates]
    durations = [load_duration_s(warm_up_s, x, answer) for x in windows]
    nums = [num_requests_for(*x) for x in zip(rates, durations, strict=True)]
    lengths = pair.draw(np.random.default_rng(options.seed), max(nums))
    loads = []
    for rate, window_s, duration_s, num in zip(
        rates, windows, durations, nums, strict=True
    ):
        rng = np.random.default_rng([options.seed, 1])
        arrival_s = draw_arrivals(rng, options.arrivals, rate_per_s=rate, num=num)
        num = int(np.searchsorted(arrival_s, duration_s))
        tokens = Lengths(*(x[:num].astype(int) for x in lengths))
        loads.append(
            make_server_load(
                arrival_s[:num],
                prefix + tokens.prompt,
                tokens.output,
                prefix_tokens=np.full(num, prefix if options.prefix_caching else 0),
                block_size=block,
                warm_up_s=warm_up_s,
                window_s=window_s,
                resident_blocks=cached // block,
            )
        )
    return Loads(tuple(loads), rates, num_slots)


def _length_pair(options: SimulateOptions, setup: ServerSetup) -> Pair:
    """Returns the distribution of prompts, without their prefix, and answers."""
    prompt = parse_tokens("--prompt-tokens", options.prompt_tokens)
    answer = parse_tokens("--answer-tokens", options.answer_tokens)
    if isinstance(prompt, str) and prompt == answer:
        pair = _LENGTH_PAIRS[prompt]
    else:
        pair = Pair(
            prompt=_LENGTH_PAIRS[prompt].prompt
            if isinstance(prompt, str)
            else Fixed(tokens=prompt),
            output=_LENGTH_PAIRS[answer].output
            if isinstance(answer, str)
            else Fixed(tokens=answer),
            keeps_means=True,
        )
    room = setup.max_model_len - options.prefix_tokens
    needed = pair.prompt.mean + pair.output.mean
    if needed > room:
        raise ValueError(
            f"--max-model-len {setup.max_model_len}: must be at least "
            f"{options.prefix_tokens + needed:g}, the tokens of a request"
        )
    return dataclasses.replace(pair, max_length=min(pair.max_length, room))


def _window_s(options: SimulateOptions, rate: float) -> float:
    if options.duration is not None:
        return options.duration
    if options.num_requests is not None:
        return options.num_requests / rate
    return max(WINDOW_S, NUM_REQUESTS / rate)


def _expect(
    options: SimulateOptions,
    setup: ServerSetup,
    posterior: ServerPosterior,
    rate: float,
    tokens: tuple[float, float, float],
) -> tuple[float, int]:
    """Returns the warm-up in s and the slots that a load needs in its steady state.

    Args:
      options: the options.
      setup: the server.
      posterior: the coefficients, of which the mode counts.
      rate: requests per second.
      tokens: mean tokens of a prompt, those of them that are cached, and tokens of an
        answer.
    """
    prompt, cached, answer = tokens
    numbers = rate, prompt, prompt - cached, answer, setup.max_num_seqs
    steady = find_steady_state(
        SteadyLoad(*map(jnp.float32, numbers)),
        setup.cost(draw_coefficients(posterior.mode)),
    )
    end_to_end_s = float(steady.end_to_end_s)
    warm_up_s = options.warm_up
    if warm_up_s is None:
        warm_up_s = choose_warm_up_s(end_to_end_s)
    mean = min(rate * end_to_end_s, setup.max_num_seqs)
    slots = 32
    while slots < min(mean + 4 * mean**0.5, setup.max_num_seqs):
        slots *= 2
    return warm_up_s, slots


def read_loads(
    options: SimulateOptions, setup: ServerSetup, posterior: ServerPosterior
) -> Loads:
    """Reads the requests of a trace, at its own rate or at others."""
    assert options.trace is not None
    try:
        recording = read_recording(
            options.trace,
            skip_empty=True,
            time_unit=options.time_unit,
            chunk_tokens=options.chunk_tokens,
        )
    except ValueError as error:
        # The library names its arguments, and the command its flags.
        text = str(error).replace("time_unit=", "--time-unit ")
        text = text.replace("chunk_tokens=", "--chunk-tokens ")
        raise ValueError(text) from None
    session = None
    if recording.after is not None:
        session = recording.session
        for flag in ("num_requests", "duration", "warm_up"):
            if getattr(options, flag) is not None:
                raise ValueError(
                    f"--{flag.replace('_', '-')} and the sessions of {options.trace} "
                    "exclude each other: sessions are served to their ends"
                )
    if options.cache_tokens and recording.chunk_ids is None:
        raise ValueError(
            f"{options.trace}: --cache-tokens {options.cache_tokens} needs hash_ids, "
            "the ids of repeated chunks"
        )
    rates = parse_sweep(options.sweep) or (options.rate,)
    loads = []
    load_rates = []
    for rate in rates:
        scaled = recording if rate is None else recording.at_rate(rate)
        workload = scaled.workload(cache_tokens=options.cache_tokens or None)
        if session is None:
            load = _cut_trace(options, workload)
        else:
            resident = options.cache_tokens // options.block_size
            end_s = float(scaled.arrival_s.max()) + 1e-3
            load = ServerLoad(workload, 0.0, end_s, resident)
        prompt = np.asarray(load.workload.prompt)
        output = load.workload.output
        longest = prompt + np.asarray(output)
        if load.workload.context is not None:
            longest = longest + np.asarray(load.workload.context)
        if longest.max() > setup.max_model_len:
            raise ValueError(
                f"{options.trace}: request {int(longest.argmax()) + 1} has "
                f"{longest.max():,} tokens, and --max-model-len is "
                f"{setup.max_model_len:,}"
            )
        loads.append(load)
        load_rates.append(int(load.is_measured.sum()) / load.window_s)
    _, num_slots = _expect(
        options, setup, posterior, max(load_rates), mean_tokens(loads[-1])
    )
    final_rates = tuple(x or y for x, y in zip(rates, load_rates, strict=True))
    return Loads(tuple(loads), final_rates, num_slots, recording.doubts, session)


def read_compared_load(
    options: SimulateOptions, setup: ServerSetup
) -> tuple[RequestLog, Loads]:
    """Reads a log of requests; those that are not fitted are measured.

    Raises:
      ValueError: the log cannot be used, or all requests are fitted.
    """
    assert options.trace is not None
    log = read_request_log(options.trace)
    num_fitted = options.fit_requests or 0
    if num_fitted >= len(log.row):
        raise ValueError(
            f"--fit-requests {num_fitted}: must be below {len(log.row)}, the requests "
            f"of {options.trace}"
        )
    load = make_log_load(log, setup)
    end_s = load.warm_up_s + load.window_s
    begin_s = float(log.arrival_s[num_fitted])
    load = load._replace(warm_up_s=begin_s, window_s=end_s - begin_s)
    rate = int(load.is_measured.sum()) / load.window_s
    return log, Loads((load,), (rate,), setup.max_num_seqs)


def mean_tokens(load: ServerLoad) -> tuple[float, float, float]:
    """Returns the mean tokens of prompts, of their cached parts, and of answers."""
    w = load.workload
    cached = 0.0 if w.context is None else float(np.mean(np.asarray(w.context)))
    prompt, answer = (float(np.mean(np.asarray(x))) for x in (w.prompt, w.output))
    return prompt + cached, cached, answer


def _cut_trace(options: SimulateOptions, workload: Workload) -> ServerLoad:
    """Takes the first requests of a trace, and those that follow the window."""
    arrival_s = clock.to_seconds(np.asarray(workload.arrival))
    warm_up_s = options.warm_up or 0.0
    measured = arrival_s[arrival_s >= warm_up_s]
    if options.num_requests is not None:
        measured = measured[: options.num_requests]
    end_s = float(measured[-1]) + 1e-3 if measured.size else warm_up_s
    if options.duration is not None:
        end_s = min(end_s, warm_up_s + options.duration)
    if end_s <= warm_up_s:
        raise ValueError(f"{options.trace}: no request arrives after the warm-up")
    answer = float(np.mean(np.asarray(workload.output)))
    last_s = load_duration_s(warm_up_s, end_s - warm_up_s, answer)
    num = int(np.searchsorted(arrival_s, last_s))
    cut = jax.tree.map(lambda x: x[:num] if np.ndim(x) else x, workload)
    resident = options.cache_tokens // options.block_size
    return ServerLoad(cut, warm_up_s, end_s - warm_up_s, resident)
