"""Runs of a load on a simulated server, for many draws of coefficients at once.

A `ServerSetup` describes the server and a `ServerLoad` its requests. Latencies are
measured over the requests that arrive in a window after a warm-up. The load continues
after the window, and every request is served to its end.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import (
    FCFS,
    ChunkedPrefill,
    Policy,
    Static,
    VLLMScheduler,
    vllm_scheduler,
)
from jaxkv.simulation import (
    Capacity,
    SimulationMember,
    SimulationResult,
    Totals,
    pad_workload,
    simulate,
    stack,
)
from jaxkv.workloads import time_per_output_token_s
from scaling.calibration.server_cost import ServerCoefficients
from scaling.calibration.servers import ServerLoad, ServerSetup

_REQUESTS = 256
"""Workloads are padded to a multiple, so that loads share programs."""
_HEAD_SIZE = 16
"""Waiting requests that a policy of `_IN_ORDER` sees in a step; a larger head is slower
and admits no more requests unless it admits more than 16 in a step."""
_IN_ORDER = (VLLMScheduler, FCFS, ChunkedPrefill, Static)
"""Policies that admit in order of arrival."""
_GROWTH_SHARE = 0.05
"""Growth of the queue in the window above which a load is overloaded, as a share of the
requests that arrive in the window."""


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
    totals: Totals
    """Steps, their time and their tokens after the warm-up."""
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


@validation.checks_numbers()
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

    All loads and draws are members of one mapped program. Loads with about the same
    number of requests share a program for equal numbers of loads and draws.

    Args:
      setup: the server.
      loads: the loads.
      coefficients: draws, with one leading axis on every leaf: each load is simulated
        with all of them. With two leading axes, loads and draws, each load has its own.
      policy: scheduling policy; None is vLLM's. A policy that does not admit in order
        of arrival sees the whole queue, at a cost: 64 waiting requests take 1.5 times
        the time of 16, 256 take 4 times and 1,024 take 14 times, and each power of 2 is
        a program of its own.
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
    if np.ndim(coefficients.step_s) not in (1, 2):
        raise ValueError(
            "coefficients must have one leading axis, of draws, or two, of loads and "
            "draws"
        )
    shape = (len(loads), np.shape(coefficients.step_s)[-1])
    draws = jax.tree.map(lambda x: np.broadcast_to(x, shape), coefficients)
    num_slots = validation.integer("num_slots", num_slots, low=1)
    num_slots = min(num_slots, setup.max_num_seqs)
    if policy is None:
        policy = vllm_scheduler(max_num_seqs=setup.max_num_seqs)
    for load in loads:
        _refuse_misfits(setup, load)
    is_ordered = isinstance(policy, _IN_ORDER)
    head = _HEAD_SIZE
    runs: dict[int, ServerRun] = {}
    waiting = list(range(len(loads)))
    while waiting:
        chosen = [loads[at] for at in waiting]
        part = ServerCoefficients(*(x[waiting] for x in draws))
        simulation = simulate(
            _make_members(setup, chosen, part, policy),
            max_slots=num_slots,
            head=head,
            since_s=max(load.warm_up_s for load in chosen),
            keep_trace=keep_trace,
            progress=progress,
        )
        longest = head
        for place, at in enumerate(waiting):
            run, peak = _read_run(setup, chosen, place, part, simulation)
            has_slots = peak <= num_slots or num_slots == setup.max_num_seqs
            if (has_slots and (is_ordered or peak <= head)) or progress.stopped:
                runs[at] = run
            longest = max(longest, peak)
        waiting = [at for at in waiting if at not in runs]
        num_slots = min(2 * num_slots, setup.max_num_seqs)
        if not is_ordered:
            head = 1 << (longest - 1).bit_length()
    return [runs[at] for at in range(len(loads))]


def make_server_member(
    setup: ServerSetup,
    load: ServerLoad,
    coefficients: ServerCoefficients,
    policy: Policy,
) -> SimulationMember:
    """Makes the simulation of a load for one draw of the coefficients.

    The pages of cached prompts are no part of its pool.
    """
    draw = jax.tree.map(lambda x: np.reshape(x, (1, 1)), coefficients)
    members = _make_members(setup, [load], draw, policy)
    return jax.tree.map(lambda x: x[0], members)


def _refuse_misfits(setup: ServerSetup, load: ServerLoad) -> None:
    w = load.workload
    prompt = np.asarray(w.prompt)
    output = np.asarray(w.output)
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
    max_requests = max(load.workload.prompt.shape[0] for load in loads)
    padded = -(-max_requests // _REQUESTS) * _REQUESTS
    workloads = [pad_workload(load.workload, padded) for load in loads]
    first = stack(
        [
            SimulationMember(
                workload=workloads[0],
                capacity=Capacity.of(
                    num_pages=setup.num_kv_blocks,
                    page_size=setup.block_size,
                    max_length=setup.max_model_len,
                    token_budget=setup.max_num_batched_tokens,
                ),
                policy=policy,
                cost=setup.cost(jax.tree.map(lambda _: 0.0, coefficients)),
            )
        ]
    )
    num_draws = np.shape(coefficients.step_s)[1]
    num = num_draws * len(loads)
    members = jax.tree.map(lambda x: np.repeat(x, num, axis=0), first)
    resident = np.tile([load.resident_blocks for load in loads], num_draws)
    draws = jax.tree.map(lambda x: x.T.ravel(), coefficients)
    return members._replace(
        workload=jax.tree.map(lambda *x: np.stack(x * num_draws), *workloads),
        capacity=members.capacity._replace(
            num_pages=members.capacity.num_pages - resident.astype(np.int32)
        ),
        cost=members.cost._replace(coefficients=draws),
    )


def _read_run(
    setup: ServerSetup,
    loads: Sequence[ServerLoad],
    place: int,
    coefficients: ServerCoefficients,
    simulation: SimulationResult,
) -> tuple[ServerRun, int]:
    """Returns the run of a load, and the largest number of requests in the system."""
    load = loads[place]
    step = len(loads)
    output = np.asarray(load.workload.output)
    arrival, first, finish = (
        x[place::step, : output.size]
        for x in (simulation.arrival_s, simulation.first_s, simulation.finish_s)
    )
    peak = max(map(_max_in_system, arrival, finish))
    # The delays of a request change no schedule, so they are added here.
    f = jax.tree.map(lambda x: np.asarray(x[place], np.float64)[:, None], coefficients)
    late_s = f.ingest_s + f.delivery_lag * (finish - first) / np.maximum(output - 1, 1)
    blocks = setup.num_kv_blocks

    def share(used: ArrayLike) -> np.ndarray:
        return (np.asarray(used)[place::step] + load.resident_blocks) / blocks

    trace = simulation.trace
    run = ServerRun(
        load=load,
        arrival_s=arrival,
        first_s=first + late_s + f.first_token_s,
        finish_s=finish + late_s + f.stream_s,
        used_share=share(simulation.means.used_pages),
        totals=jax.tree.map(lambda x: np.asarray(x)[place::step], simulation.totals),
        step_start_s=None if trace is None else trace.start_s[place::step],
        step_used_share=None if trace is None else share(trace.info.used_pages),
    )
    return run, peak


def _max_in_system(
    arrival_s: Float[np.ndarray, " requests"], finish_s: Float[np.ndarray, " requests"]
) -> int:
    """Returns the largest number of requests that wait or run at the same time."""
    arrived = np.arange(1, arrival_s.size + 1)
    ended = np.searchsorted(np.sort(finish_s), np.sort(arrival_s), side="right")
    return int(np.max(arrived - ended))
