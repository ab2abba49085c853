"""A server, its coefficients and its loads, resolved from the options."""

import dataclasses
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxkv.files import read_json
from jaxkv.scheduling import (
    IN_ORDER_NAMES,
    POLICY_NAMES,
    Policy,
    find_eviction,
    find_policy,
)
from scaling import shapes
from scaling.calibration import (
    LOOP_FILE,
    PUBLISHED_SERVERS,
    MeasuredServer,
    MeasurementGain,
    RequestLog,
    ServerLoad,
    ServerPosterior,
    ServerSetup,
    SteadyLoad,
    draw_loop_posterior,
    fit_request_log,
    load_loops,
    load_posterior,
    rank_measurements,
    take_draws,
)
from scaling.cli.cost import find_description
from scaling.cli.simulate.loads import (
    draw_loads,
    mean_tokens,
    read_compared_load,
    read_loads,
)
from scaling.cli.simulate.options import (
    LatencyObjective,
    SimulateOptions,
    parse_objectives,
)
from scaling.costs import find_device, parse_layout
from scaling.shapes import ModelShape

MAX_DRAWS = 32
"""Draws of a load without `--draws`, at most; tables of stages have all draws."""
REQUESTS_FOR = {"mean": 1, "p50": 2, "p90": 10, "p99": 100}
"""Requests in the window from which a statistic is reported: a percentile lies between
two of them."""


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
    doubts: tuple[str, ...] = ()
    """Doubts about the rows of a trace, and about the policy."""
    usd_per_hour: float | None = None
    """Price of one device."""
    grams_per_kwh: float | None = None
    """Carbon of energy."""
    log: RequestLog | None = None
    """Measured times of the requests, with `--compare`."""
    session: Int[np.ndarray, " requests"] | None = None
    """Session of each request of a trace with sessions."""

    @property
    def num_measured(self) -> list[int]:
        """Requests in the window of each load."""
        return [int(load.is_measured.sum()) for load in self.loads]


def load_coefficients(
    options: SimulateOptions, setup: ServerSetup | None = None
) -> ServerPosterior:
    """Reads a posterior and takes draws, or draws from a fit of tables of servers.

    Args:
      options: the file and the number of draws.
      setup: the server, for a fit of tables; None for several servers.

    Raises:
      ValueError: the file cannot be read, has fewer draws, or does not have the server.
    """
    path = options.coefficients or PUBLISHED_SERVERS
    if read_json(path).get("kind") == LOOP_FILE:
        if setup is None:
            raise ValueError(
                f"--coefficients {path}: is a fit of tables of servers, and --stages "
                "needs one of load stages"
            )
        return _draw_of_tables(options, setup)
    posterior = load_posterior(path)
    num_available = len(posterior.deviations)
    num = options.draws
    if num is None:
        num = (
            num_available
            if options.stages is not None
            else min(MAX_DRAWS, num_available)
        )
    if num > num_available:
        raise ValueError(f"--draws {num}: the coefficients have {num_available}")
    return take_draws(posterior, num)


def _draw_of_tables(options: SimulateOptions, setup: ServerSetup) -> ServerPosterior:
    """Draws the coefficients of a vLLM server from a fit of tables."""
    assert options.coefficients is not None
    calibration = load_loops(options.coefficients)
    server = MeasuredServer(
        name=setup.model.name,
        engine="vllm",
        checkpoint=setup.model.name,
        model=setup.model,
        device=setup.device,
        weight_format="bf16",
        num_devices=setup.tensor_parallel,
        data_parallel=1,
        expert_parallel=1,
        concurrency=1.0,
        prompt_tokens=1.0,
        answer_tokens=1.0,
    )
    num = options.draws or MAX_DRAWS
    try:
        return draw_loop_posterior(server, calibration, num=num, seed=options.seed)
    except ValueError as error:
        raise ValueError(f"--coefficients {options.coefficients}: {error}") from None


def resolve_server_case(name: str, options: SimulateOptions) -> ServerCase:
    """Looks up model, device and coefficients, and makes the loads.

    Raises:
      ValueError: a name is unknown, a length or a rate is missing, options exclude each
        other, or the window has too few requests for the objectives.
    """
    model = find_description(name)
    _check_combination(options)
    positions = [x for x in (*model.windows, model.max_positions) if x]
    setup = ServerSetup(
        model=model,
        device=find_device(options.device),
        tensor_parallel=_find_degree(options),
        max_model_len=options.max_model_len or min(positions, default=2**20),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        num_blocks=options.num_blocks,
    )
    setup = dataclasses.replace(setup, num_blocks=setup.num_kv_blocks)
    log = None
    if options.compare:
        log, loads = read_compared_load(options, setup)
        policy = _make_policy(options, loads.loads)
        posterior = _fit_coefficients(options, setup, log, policy)
    else:
        posterior = load_coefficients(options, setup)
        make = read_loads if options.trace is not None else draw_loads
        loads = make(options, setup, posterior)
        policy = _make_policy(options, loads.loads)
    objectives = parse_objectives(options.objective)
    case = ServerCase(
        setup=setup,
        policy_name=options.policy,
        policy=policy,
        posterior=posterior,
        loads=loads.loads,
        rates=loads.rates,
        objectives=objectives,
        num_slots=loads.num_slots,
        fitted_model=_find_fitted(model, posterior),
        doubts=(*loads.doubts, *_policy_doubts(options.policy)),
        usd_per_hour=options.usd_per_hour,
        grams_per_kwh=options.grams_per_kwh,
        log=log,
        session=loads.session,
    )
    num = min(case.num_measured)
    for objective in objectives:
        if num < (needed := REQUESTS_FOR[objective.statistic]):
            raise ValueError(
                f"--objective {objective.text}: needs {needed} requests in the "
                f"window, and there are {num}; --duration or --num-requests sets them"
            )
    return case


def find_next_measurements(case: ServerCase) -> list[MeasurementGain]:
    """Ranks loads of the server that would narrow the intervals of its last load.

    Candidates have a tenth, half and all of its rate, and a quarter to 4 times the
    tokens of its prompts and answers, as far as they fit into a sequence.
    """
    load = case.loads[-1]
    prompt, cached, answer = mean_tokens(load)
    rate = case.rates[-1]
    seqs = float(case.setup.max_num_seqs)
    factors = itertools.product((0.1, 0.5, 1.0), (0.25, 1.0, 4.0), (0.25, 1.0, 4.0))
    new = prompt - cached

    def steady_load(rate: float, *tokens: float) -> SteadyLoad:
        numbers = (rate, *(max(1.0, x) for x in tokens), seqs)
        return SteadyLoad(*map(jnp.float32, numbers))

    candidates = [
        steady_load(rate * share, prompt * longer, new * longer, answer * more)
        for share, longer, more in factors
        if prompt * longer + answer * more <= case.setup.max_model_len
    ]
    target = steady_load(rate, prompt, new, answer)
    return rank_measurements(case.posterior, case.setup, target, candidates)


def _fit_coefficients(
    options: SimulateOptions, setup: ServerSetup, log: RequestLog, policy: Policy
) -> ServerPosterior:
    """Fits the coefficients to the first requests of a log, or reads them."""
    if options.fit_requests is None:
        return load_coefficients(options, setup)
    num = options.draws or MAX_DRAWS
    return fit_request_log(
        log,
        setup,
        num_fitted=options.fit_requests,
        policy=policy,
        num_draws=num,
        seed=options.seed,
    )


def _check_combination(options: SimulateOptions) -> None:
    """Refuses a load without lengths or rate, and options that exclude each other."""
    if options.dtype not in ("bfloat16", "float16"):
        raise ValueError(
            f"--dtype {options.dtype}: the cost model of servers is fitted in 16 bits"
        )
    pairs = [("rate", "sweep"), ("num_requests", "duration")]
    pairs.append(("record", "sweep"))
    pairs.append(("num_blocks", "gpu_memory_utilization"))
    of_trace = ("prompt_tokens", "answer_tokens", "prefix_tokens", "arrivals")
    pairs += [(name, "trace") for name in of_trace]
    of_draws = ("rate", "sweep", "num_requests", "duration", "warm_up")
    of_draws += ("cache_tokens", "chunk_tokens", "time_unit")
    pairs += [(name, "compare") for name in of_draws]
    pairs.append(("fit_requests", "coefficients"))
    plain = SimulateOptions()
    for pair in pairs:
        if all(getattr(options, x) != getattr(plain, x) for x in pair):
            first, second = (f"--{x.replace('_', '-')}" for x in pair)
            raise ValueError(f"{first} and {second} exclude each other")
    if options.fit_requests is not None and not options.compare:
        raise ValueError("--fit-requests needs --compare")
    if options.compare and options.trace is None:
        raise ValueError("--compare needs --trace, a log of requests")
    if options.trace is not None:
        return
    if options.cache_tokens:
        raise ValueError("--cache-tokens needs --trace; --prefix-tokens has its own")
    for flag in ("time_unit", "chunk_tokens"):
        if getattr(options, flag) is not None:
            raise ValueError(f"--{flag.replace('_', '-')} needs --trace")
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
    degrees = {
        "--parallel tp": layout.tensor if options.parallel else None,
        "--tp": options.tp,
        "--devices": options.devices,
    }
    values = {flag: x for flag, x in degrees.items() if x is not None}
    if len(set(values.values())) > 1:
        shown = " and ".join(f"{flag} {x}" for flag, x in values.items())
        raise ValueError(
            f"{shown}: must be equal; replicas are not simulated, so give the load of "
            "one server"
        )
    return next(iter(values.values()), 1)


def _make_policy(options: SimulateOptions, loads: tuple[ServerLoad, ...]) -> Policy:
    if options.policy == "prefill-first":
        # A preempted request feeds its answer again, in one step with its prompt.
        longest = max(
            int(np.max(np.asarray(x.workload.prompt) + np.asarray(x.workload.output)))
            for x in loads
        )
        if longest > options.max_num_batched_tokens:
            raise ValueError(
                f"--max-num-batched-tokens {options.max_num_batched_tokens}: must be "
                f"at least {longest} for whole prompts, the tokens of a request"
            )
    if options.policy in POLICY_NAMES and options.policy not in IN_ORDER_NAMES:
        names = ", ".join(IN_ORDER_NAMES)
        raise ValueError(
            f"--policy {options.policy}: orders by attributes of requests, which this "
            f"load does not have; must be one of {names}, or a file"
        )
    # The number of slots bounds the running sequences of policies other than vLLM's.
    return find_policy(options.policy, max_running=options.max_num_seqs)


def _policy_doubts(policy: str) -> tuple[str, ...]:
    """Returns a warning if the policy file has a rule that these loads do not use."""
    if find_eviction(policy) is None:
        return ()
    return (
        f"the eviction of {policy} changes nothing: the requests of this load have no "
        "earlier turns, and a prefix that all share stays",
    )


def _find_fitted(model: ModelShape, posterior: ServerPosterior) -> str | None:
    """Returns the fitted model of the same shape, under any name."""
    for name in posterior.residuals:
        if dataclasses.replace(model, name=name) == shapes.describe_checkpoint(name):
            return name
    return None
