"""A load on a simulated server, for many draws of coefficients at once.

A `ServerSetup` describes the server and a `ServerLoad` its requests. Latencies are
measured over the requests that arrive in a window after a warm-up. The load continues
after the window, and every request is served to its end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import clock, validation
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import Policy, vllm_scheduler
from jaxkv.simulation import (
    Capacity,
    SimulationMember,
    SimulationResult,
    pad_workload,
    simulate,
    stack,
)
from jaxkv.workloads import Workload, make_workload, time_per_output_token_s
from scaling.calibration.server_cost import ServerCoefficients, make_server_cost
from scaling.costs import Device, count_parameters, kv_bytes_per_token
from scaling.shapes import HeadAttention, ModelShape

type ArrivalProcess = Literal["constant", "poisson"]

_JITTER_S = 5e-3
"""Largest delay of an arrival of a "constant" load, in s."""
_TAIL_S_PER_TOKEN, _MAX_TAIL_S = 0.02, 30.0
"""Load after the window: seconds per token of an answer, and limit in s."""
_REQUESTS = 256
"""Workloads are padded to a multiple, so that loads share programs."""
_HEAD = 16
"""Waiting requests that the scheduler sees in a step; a larger head is slower and
admits no more requests unless more than 16 arrive in a step."""
_GROWTH_SHARE = 0.05
"""Growth of the queue in the window above which a load is overloaded, as a share of the
requests that arrive in the window."""


def num_kv_blocks(
    model: ModelShape,
    device: Device,
    *,
    tensor_parallel: int = 1,
    block_size: int = 16,
    memory_share: int | float = 0.9,
    reserved_bytes: int | float = 2e9,
) -> int:
    """Returns the blocks of the KV cache of a vLLM server in 16 bits.

    Each device has `memory_share` of its memory for its part of the weights, for
    activations and runtime, and for blocks of all layers. Llama-2-7B on an H100: (72 -
    13.5 - 2) GB / 8.4 MB = 6,738 blocks.

    Args:
      model: shape of the model.
      device: accelerator.
      tensor_parallel: number of devices.
      block_size: tokens of a block.
      memory_share: vLLM's `gpu_memory_utilization`, in (0, 1].
      reserved_bytes: activations of the largest step and runtime, per device; vLLM
        measures them when it starts.

    Raises:
      ValueError: the weights do not fit, or a share is out of range.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"{memory_share=} must be in (0, 1]")
    heads = 1
    if isinstance(model.attention, HeadAttention):
        heads = min(tensor_parallel, model.attention.num_kv_heads)
    weights = 2 * count_parameters(model).total / tensor_parallel
    left = memory_share * device.memory_bytes - weights - reserved_bytes
    blocks = int(left // (block_size * kv_bytes_per_token(model) / heads))
    if blocks < 1:
        raise ValueError(
            f"{model.name} does not fit into {tensor_parallel} {device.name}: "
            f"{weights / 1e9:.1f} GB of weights each"
        )
    return blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """A vLLM server in 16 bits; settings have vLLM's names."""

    model: ModelShape
    """Shape of the model."""
    device: Device
    """Accelerator."""
    tensor_parallel: int = 1
    """Devices that divide the model."""
    max_model_len: int
    """Largest length of a sequence in tokens, at least 2."""
    max_num_batched_tokens: int = 2048
    """Largest number of tokens fed in a step."""
    max_num_seqs: int = 128
    """Largest number of running sequences."""
    block_size: int = 16
    """Tokens of a block of the KV cache."""
    num_blocks: int | None = None
    """Blocks of the KV cache; None if they follow from the devices' memory."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the KV cache.

        Raises:
          ValueError: the weights do not fit into the devices.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        return num_kv_blocks(
            self.model,
            self.device,
            tensor_parallel=self.tensor_parallel,
            block_size=self.block_size,
        )


class ServerLoad(NamedTuple):
    """Requests of a server, and the window in which they are measured."""

    workload: Workload
    warm_up_s: float
    """Start of the window in s."""
    window_s: float
    """Length of the window in s."""
    resident_blocks: int = 0
    """Blocks of the prompts in the prefix cache."""

    @property
    def is_measured(self) -> Bool[np.ndarray, " requests"]:
        """True for requests that arrive in the window."""
        arrival_s = clock.to_seconds(np.asarray(self.workload.arrival))
        end_s = self.warm_up_s + self.window_s
        return (arrival_s >= self.warm_up_s) & (arrival_s < end_s)


def load_duration_s(
    warm_up_s: float, window_s: float, answer_tokens: int | float
) -> float:
    """Returns the seconds of load that a window needs: requests arrive after it, too.

    Args:
      warm_up_s: start of the window in s.
      window_s: length of the window in s.
      answer_tokens: tokens of an answer.
    """
    tail_s = min(_TAIL_S_PER_TOKEN * answer_tokens, _MAX_TAIL_S)
    return warm_up_s + window_s + tail_s


def draw_arrivals(
    rng: np.random.Generator, kind: ArrivalProcess, *, rate_per_s: float, num: int
) -> Float[np.ndarray, " num"]:
    """Draws the arrival times of a client's requests in s.

    Args:
      rng: random generator.
      kind: "poisson", or "constant": evenly spaced, with delays of up to 5 ms.
      rate_per_s: mean requests per second.
      num: requests.
    """
    if kind == "poisson":
        return np.cumsum(rng.exponential(1 / rate_per_s, num))
    return np.sort(np.arange(num) / rate_per_s + _JITTER_S * rng.random(num))


def make_server_load(
    arrival_s: Float[np.ndarray, " requests"],
    prompt: Int[np.ndarray, " requests"],
    answer: Int[np.ndarray, " requests"],
    *,
    known: Int[np.ndarray, " requests"],
    block_size: int,
    warm_up_s: float,
    window_s: float,
    resident_blocks: int = 0,
) -> ServerLoad:
    """Makes a load whose prompts begin with tokens that the server knows.

    Full blocks of the known tokens are cached; the last token of a prompt is always
    fed.

    Args:
      arrival_s: arrival times in s, ascending.
      prompt: tokens of each prompt, known ones included.
      answer: tokens of each answer.
      known: leading tokens of each prompt that an earlier prompt had as well; 0 without
        a prefix cache.
      block_size: tokens of a block.
      warm_up_s: start of the window in s.
      window_s: length of the window in s.
      resident_blocks: blocks of the known tokens, which stay in memory.

    Raises:
      ValueError: a number is out of range, or no request arrives in the window.
    """
    cached = np.minimum(known, prompt - 1) // block_size * block_size
    workload = make_workload(arrival_s, prompt - cached, answer, context=cached)
    load = ServerLoad(workload, warm_up_s, window_s, resident_blocks)
    if not load.is_measured.any():
        raise ValueError(f"{window_s=} must be longer: no request arrives in it")
    return load


class RequestLatencies(NamedTuple):
    """Latencies of requests as their clients measure them."""

    end_to_end_s: Float[np.ndarray, "draws requests"]
    """From a request to its last token."""
    first_token_s: Float[np.ndarray, "draws requests"]
    """From a request to its first token."""
    inter_token_s: Float[np.ndarray, "draws requests"]
    """Mean time between the tokens of a request; 0 for a single token."""


class ServerRun(NamedTuple):
    """Times of the requests of a load as their clients see them, for each draw."""

    load: ServerLoad
    arrival_s: Float[np.ndarray, "draws requests"]
    first_s: Float[np.ndarray, "draws requests"]
    """Time of the first token."""
    finish_s: Float[np.ndarray, "draws requests"]
    """Time of the last token."""
    used_share: Float[np.ndarray, " draws"]
    """Mean share of the blocks in use while the server works, cached prompts included;
    over the steps after the warm-up."""
    step_start_s: Float[np.ndarray, "draws steps"] | None
    """Start of each step in s; None without a trace."""
    step_used_share: Float[np.ndarray, "draws steps"] | None
    """Share of the blocks in use in each step; None without a trace."""

    def latencies(self) -> RequestLatencies:
        """Returns the latencies of the requests that arrive in the window."""
        at = self.load.is_measured
        arrival, first, finish = (
            x[:, at] for x in (self.arrival_s, self.first_s, self.finish_s)
        )
        output = np.asarray(self.load.workload.output)[at]
        gap = time_per_output_token_s(first, finish, output)
        return RequestLatencies(finish - arrival, first - arrival, gap)

    def is_overloaded(self) -> Bool[np.ndarray, " draws"]:
        """Returns True for draws whose queue grows in the window.

        The queue is the requests without a first token. It grows if it is longer at the
        end of the window than at its start by more than 5 % of the requests that arrive
        in between.
        """
        begin_s = self.load.warm_up_s
        before, after = (
            np.sum((self.arrival_s <= time_s) & ~(self.first_s <= time_s), axis=1)
            for time_s in (begin_s, begin_s + self.load.window_s)
        )
        return after - before > _GROWTH_SHARE * np.sum(self.load.is_measured)

    def num_finished(self) -> Int[np.ndarray, " draws"]:
        """Returns the requests that finish in the window."""
        return self._finish_in_window().sum(axis=1)

    def num_tokens(self) -> Int[np.ndarray, " draws"]:
        """Returns the tokens of the answers that finish in the window."""
        output = np.asarray(self.load.workload.output)
        return np.sum(self._finish_in_window() * output, axis=1)

    def _finish_in_window(self) -> Bool[np.ndarray, "draws requests"]:
        begin_s = self.load.warm_up_s
        return (self.finish_s >= begin_s) & (
            self.finish_s < begin_s + self.load.window_s
        )


def simulate_server(
    setup: ServerSetup,
    loads: Sequence[ServerLoad],
    coefficients: ServerCoefficients,
    *,
    policy: Policy | None = None,
    num_slots: int = 32,
    keep_trace: bool = False,
    progress: Progress = QUIET,
) -> list[ServerRun]:
    """Simulates loads of a server for each draw of the coefficients.

    All loads and draws are members of one mapped program; the draws see the same
    requests. Loads with about the same number of requests share a program for equal
    numbers of loads and draws.

    Args:
      setup: the server.
      loads: the loads.
      coefficients: draws, with one leading axis on every leaf.
      policy: scheduling policy; None is vLLM's.
      num_slots: sequences of the first program, doubled up to `max_num_seqs` while any
        draw has more requests in the system. It changes the time, not the result.
      keep_trace: True to keep the memory of every step.
      progress: progress bar; if it is stopped, requests may have no times.

    Returns:
      A run for each load.

    Raises:
      ValueError: the model or a request does not fit into memory or `max_model_len`, or
        the coefficients have no draws.
    """
    if np.ndim(coefficients.step_s) != 1:
        raise ValueError("coefficients must have one leading axis, of draws")
    num_slots = validation.integer("num_slots", num_slots, low=1)
    num_slots = min(num_slots, setup.max_num_seqs)
    if policy is None:
        policy = vllm_scheduler(max_num_seqs=setup.max_num_seqs)
    for load in loads:
        _refuse_misfits(setup, load)
    runs: dict[int, ServerRun] = {}
    waiting = list(range(len(loads)))
    while waiting:
        chosen = [loads[at] for at in waiting]
        found = simulate(
            _make_members(setup, chosen, coefficients, policy),
            max_slots=num_slots,
            head=_HEAD,
            since_s=max(load.warm_up_s for load in chosen),
            keep_trace=keep_trace,
            progress=progress,
        )
        for place, at in enumerate(waiting):
            run, most = _read_run(setup, chosen, place, coefficients, found)
            if most <= num_slots or num_slots == setup.max_num_seqs or progress.stopped:
                runs[at] = run
        waiting = [at for at in waiting if at not in runs]
        num_slots = min(2 * num_slots, setup.max_num_seqs)
    return [runs[at] for at in range(len(loads))]


def _refuse_misfits(setup: ServerSetup, load: ServerLoad) -> None:
    w = load.workload
    prompt, output = np.asarray(w.prompt), np.asarray(w.output)
    context = 0 if w.context is None else np.asarray(w.context)
    length = prompt + output + context
    if length.max() > setup.max_model_len:
        raise ValueError(
            f"request {int(length.argmax())} has {length.max():,} tokens, and "
            f"max_model_len={setup.max_model_len}"
        )
    blocks = setup.num_kv_blocks
    # A request refers to cached blocks and has blocks for its own tokens.
    needed = load.resident_blocks - (-int((prompt + output).max()) // setup.block_size)
    if needed > blocks:
        raise ValueError(
            f"{load.resident_blocks:,} blocks of cached prompts and one request need "
            f"{needed:,} blocks, and there are {blocks:,}"
        )


def _make_members(
    setup: ServerSetup,
    loads: Sequence[ServerLoad],
    coefficients: ServerCoefficients,
    policy: Policy,
) -> SimulationMember:
    """Makes a member for each load and draw; the loads vary first.

    `simulate` takes every k-th member into a part, so that most parts have one load,
    and no member waits for a longer one.
    """
    cost = make_server_cost(
        setup.model,
        setup.device,
        jax.tree.map(lambda _: jnp.float32(0), coefficients),
        tensor_parallel=setup.tensor_parallel,
        max_length=setup.max_model_len,
    )
    most = max(load.workload.prompt.shape[0] for load in loads)
    padded = -(-most // _REQUESTS) * _REQUESTS
    each = stack(
        [
            SimulationMember(
                workload=pad_workload(load.workload, padded),
                capacity=Capacity.of(
                    num_pages=setup.num_kv_blocks - load.resident_blocks,
                    page_size=setup.block_size,
                    max_length=setup.max_model_len,
                    token_budget=setup.max_num_batched_tokens,
                ),
                policy=policy,
                cost=cost,
            )
            for load in loads
        ]
    )
    num_draws = len(np.asarray(coefficients.step_s))
    members: Any = jax.tree.map(lambda x: np.concatenate([x] * num_draws), each)
    draws = jax.tree.map(lambda x: np.repeat(x, len(loads)), coefficients)
    return members._replace(cost=members.cost._replace(coefficients=draws))


def _read_run(
    setup: ServerSetup,
    loads: Sequence[ServerLoad],
    place: int,
    coefficients: ServerCoefficients,
    found: SimulationResult,
) -> tuple[ServerRun, int]:
    """Returns the run of a load, and the largest number of requests in the system."""
    load, step = loads[place], len(loads)
    output = np.asarray(load.workload.output)
    arrival, first, finish = (
        x[place::step, : output.size]
        for x in (found.arrival_s, found.first_s, found.finish_s)
    )
    most = max(map(_max_in_system, arrival, finish))
    # The delays of a request change no schedule, so they are added here.
    f: Any = jax.tree.map(lambda x: np.asarray(x, np.float64)[:, None], coefficients)
    late_s = f.ingest_s + f.delivery_lag * (finish - first) / np.maximum(output - 1, 1)
    blocks = setup.num_kv_blocks

    def share(used: Any) -> np.ndarray:
        return (np.asarray(used)[place::step] + load.resident_blocks) / blocks

    trace = found.trace
    run = ServerRun(
        load=load,
        arrival_s=arrival,
        first_s=first + late_s + f.first_token_s,
        finish_s=finish + late_s + f.stream_s,
        used_share=share(found.means.used_pages),
        step_start_s=None if trace is None else trace.start_s[place::step],
        step_used_share=None if trace is None else share(trace.info.used_pages),
    )
    return run, most


def _max_in_system(
    arrival_s: Float[np.ndarray, " requests"], finish_s: Float[np.ndarray, " requests"]
) -> int:
    """Returns the largest number of requests that wait or run at the same time."""
    arrived = np.arange(1, arrival_s.size + 1)
    ended = np.searchsorted(np.sort(finish_s), arrival_s, side="right")
    return int(np.max(arrived - ended))
