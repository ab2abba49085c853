"""A server, its coefficients and its loads, resolved from the options."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli.cost import command as cost
from experiments.cli.simulate.options import (
    LatencyObjective,
    SimulateOptions,
    parse_objectives,
    parse_sweep,
    parse_tokens,
)
from jaxkv import clock, scheduling
from jaxkv.scheduling import Policy
from jaxkv.workloads import (
    ALPACA,
    SHAREGPT,
    Fixed,
    Lengths,
    Pair,
    num_requests_for,
    read_recording,
)
from scaling import shapes
from scaling.calibration import (
    PUBLISHED_SERVERS,
    ServerLoad,
    ServerPosterior,
    ServerSetup,
    SteadyLoad,
    draw_arrivals,
    draw_coefficients,
    find_steady_state,
    load_duration_s,
    load_posterior,
    make_server_cost,
    make_server_load,
    take_draws,
)
from scaling.costs import find_device, parse_layout
from scaling.shapes import ModelShape

MIN_WARM_UP_S, MIN_WINDOW_S = 8.0, 25.0
NUM_REQUESTS = 200
"""Requests in the window without `--num-requests` and `--duration`, at least."""
MAX_DRAWS = 32
"""Draws of a load without `--draws`, at most; tables of stages have all draws."""
REQUESTS_FOR = {"mean": 1, "p50": 2, "p90": 10, "p99": 100}
"""Requests in the window from which a statistic is reported: a percentile lies between
two of them."""

_PAIRS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}


class ServerCase(NamedTuple):
    """A server with its loads, validated."""

    setup: ServerSetup
    policy_name: str
    policy: Policy
    posterior: ServerPosterior
    loads: tuple[ServerLoad, ...]
    rates: tuple[float, ...]
    """Mean requests per second of each load."""
    objectives: tuple[LatencyObjective, ...]
    num_slots: int
    """Expected number of sequences in the system, rounded up."""
    fitted_model: str | None
    """Name by which the model was fitted; None if it was not."""

    @property
    def num_measured(self) -> list[int]:
        """Requests in the window of each load."""
        return [int(load.is_measured.sum()) for load in self.loads]


def load_coefficients(options: SimulateOptions) -> ServerPosterior:
    """Reads the posterior and takes the draws.

    Raises:
      ValueError: it cannot be read or has fewer draws.
    """
    posterior = load_posterior(options.coefficients or PUBLISHED_SERVERS)
    most = len(posterior.deviations)
    num = options.draws
    if num is None:
        num = most if options.stages is not None else min(MAX_DRAWS, most)
    if num > most:
        raise ValueError(f"--draws {num}: the coefficients have {most}")
    return take_draws(posterior, num)


def resolve_server_case(name: str, options: SimulateOptions) -> ServerCase:
    """Looks up model, device and coefficients, and makes the loads.

    Raises:
      ValueError: a name is unknown, a length or a rate is missing, options exclude each
        other, or the window has too few requests for the objectives.
    """
    model = cost.find_description(name)
    _check_combination(options)
    posterior = load_coefficients(options)
    positions = [x for x in (*model.windows, model.max_positions) if x]
    setup = ServerSetup(
        model=model,
        device=find_device(options.device),
        tensor_parallel=_find_degree(options),
        max_model_len=options.max_model_len or min(positions, default=2**20),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
    )
    setup = dataclasses.replace(setup, num_blocks=setup.num_kv_blocks)
    make = _trace_loads if options.trace is not None else _synthetic_loads
    loads, rates, num_slots = make(options, setup, posterior)
    objectives = parse_objectives(options.objective)
    case = ServerCase(
        setup=setup,
        policy_name=options.policy,
        policy=_make_policy(options),
        posterior=posterior,
        loads=loads,
        rates=rates,
        objectives=objectives,
        num_slots=num_slots,
        fitted_model=_find_fitted(model, posterior),
    )
    num = min(case.num_measured)
    for objective in objectives:
        if num < (needed := REQUESTS_FOR[objective.statistic]):
            raise ValueError(
                f"--objective {objective.text}: needs {needed} requests in the "
                f"window, and there are {num}; --duration or --num-requests sets them"
            )
    return case


def _check_combination(options: SimulateOptions) -> None:
    """Refuses a load without lengths or rate, and options that exclude each other."""
    if options.dtype not in ("bfloat16", "float16"):
        raise ValueError(
            f"--dtype {options.dtype}: the cost model of servers is fitted in 16 bits"
        )
    pairs = [("rate", "sweep"), ("num_requests", "duration")]
    of_trace = ("prompt_tokens", "answer_tokens", "prefix_tokens", "arrivals")
    pairs += [(name, "trace") for name in of_trace]
    plain = SimulateOptions()
    for pair in pairs:
        if all(getattr(options, x) != getattr(plain, x) for x in pair):
            first, second = (f"--{x.replace('_', '-')}" for x in pair)
            raise ValueError(f"{first} and {second} exclude each other")
    if options.trace is not None:
        return
    if options.cache_tokens:
        raise ValueError("--cache-tokens needs --trace; --prefix-tokens has its own")
    for flag, text in (
        ("--prompt-tokens", options.prompt_tokens),
        ("--answer-tokens", options.answer_tokens),
    ):
        if not text:
            raise ValueError(
                f"{flag} is missing: a number, sharegpt or alpaca; or --trace FILE"
            )
    if options.rate is None and not options.sweep:
        raise ValueError(
            "--rate is missing: requests per second, or --sweep rate=LOW:HIGH:NUMBER, "
            "or --trace FILE"
        )


def _find_degree(options: SimulateOptions) -> int:
    layout = parse_layout(options.parallel)
    plain = dataclasses.replace(layout, tensor=1)
    if plain != dataclasses.replace(parse_layout("")):
        raise ValueError(
            f"--parallel {options.parallel}: the cost model of servers has tensor "
            "parallelism only, tp=N"
        )
    given = {
        "--parallel tp": layout.tensor if options.parallel else None,
        "--tp": options.tp,
        "--devices": options.devices,
    }
    values = {flag: x for flag, x in given.items() if x is not None}
    if len(set(values.values())) > 1:
        shown = " and ".join(f"{flag} {x}" for flag, x in values.items())
        raise ValueError(
            f"{shown}: must be equal; replicas are not simulated, so give the load of "
            "one server"
        )
    return next(iter(values.values()), 1)


def _make_policy(options: SimulateOptions) -> Policy:
    if options.policy == "vllm":
        return scheduling.vllm_scheduler(max_num_seqs=options.max_num_seqs)
    # The number of slots bounds the running sequences of the other policies.
    makers: dict[str, Any] = {
        "fcfs": scheduling.fcfs,
        "chunked-prefill": scheduling.chunked_prefill,
        "static": scheduling.static,
        "shortest-remaining": scheduling.shortest_remaining,
        "fair-share": scheduling.fair_share,
        "ageing-priority": scheduling.ageing_priority,
        "earliest-deadline": scheduling.earliest_deadline,
    }
    return makers[options.policy]()


def _find_fitted(model: ModelShape, posterior: ServerPosterior) -> str | None:
    """Returns the fitted model of the same shape, under any name."""
    for name in posterior.residuals:
        if dataclasses.replace(model, name=name) == shapes.describe_checkpoint(name):
            return name
    return None


type _Loads = tuple[tuple[ServerLoad, ...], tuple[float, ...], int]


def _synthetic_loads(
    options: SimulateOptions, setup: ServerSetup, posterior: ServerPosterior
) -> _Loads:
    """Draws the loads of all rates: the same requests, arriving faster."""
    rates = parse_sweep(options.sweep) or (options.rate or math.nan,)
    pair = _length_pair(options, setup)
    prefix, block = options.prefix_tokens, options.block_size
    cached = prefix // block * block if options.prefix_caching else 0
    prompt, answer = pair.prompt.mean, pair.output.mean
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
                known=np.full(num, prefix if options.prefix_caching else 0),
                block_size=block,
                warm_up_s=warm_up_s,
                window_s=window_s,
                resident_blocks=cached // block,
            )
        )
    return tuple(loads), rates, num_slots


def _length_pair(options: SimulateOptions, setup: ServerSetup) -> Pair:
    """Returns the distribution of prompts, without their prefix, and answers."""
    prompt = parse_tokens("--prompt-tokens", options.prompt_tokens)
    answer = parse_tokens("--answer-tokens", options.answer_tokens)
    if isinstance(prompt, str) and prompt == answer:
        pair = _PAIRS[prompt]
    else:
        pair = Pair(
            prompt=_PAIRS[prompt].prompt
            if isinstance(prompt, str)
            else Fixed(tokens=prompt),
            output=_PAIRS[answer].output
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
    return max(MIN_WINDOW_S, NUM_REQUESTS / rate)


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
        make_server_cost(
            setup.model,
            setup.device,
            jax.tree.map(jnp.float32, draw_coefficients(posterior.mode)),
            tensor_parallel=setup.tensor_parallel,
            max_length=setup.max_model_len,
        ),
    )
    end_to_end_s = float(steady.end_to_end_s)
    warm_up_s = options.warm_up
    if warm_up_s is None:
        warm_up_s = max(MIN_WARM_UP_S, round(2 * end_to_end_s))
    mean = min(rate * end_to_end_s, setup.max_num_seqs)
    slots = 32
    while slots < min(mean + 4 * mean**0.5, setup.max_num_seqs):
        slots *= 2
    return warm_up_s, slots


def _trace_loads(
    options: SimulateOptions, setup: ServerSetup, posterior: ServerPosterior
) -> _Loads:
    """Reads the requests of a trace, at its own rate or at others."""
    assert options.trace is not None
    recording = read_recording(options.trace, skip_empty=True)
    if recording.after is not None:
        raise ValueError(
            f"{options.trace}: has sessions, whose requests wait for answers; `jaxkv "
            "simulate` has no metrics of jobs"
        )
    rates = parse_sweep(options.sweep) or (options.rate,)
    loads, found = [], []
    for rate in rates:
        scaled = recording if rate is None else recording.at_rate(rate)
        load = _cut_trace(
            options, scaled.workload(cache_tokens=options.cache_tokens or None)
        )
        prompt, output = np.asarray(load.workload.prompt), load.workload.output
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
        found.append(int(load.is_measured.sum()) / load.window_s)
    _, num_slots = _expect(
        options, setup, posterior, max(found), _mean_tokens(loads[-1])
    )
    return (
        tuple(loads),
        tuple(x or y for x, y in zip(rates, found, strict=True)),
        (num_slots),
    )


def _mean_tokens(load: ServerLoad) -> tuple[float, float, float]:
    w = load.workload
    cached = 0.0 if w.context is None else float(np.mean(np.asarray(w.context)))
    prompt, answer = (float(np.mean(np.asarray(x))) for x in (w.prompt, w.output))
    return prompt + cached, cached, answer


def _cut_trace(options: SimulateOptions, workload: Any) -> ServerLoad:
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
