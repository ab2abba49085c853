"""Disaggregated serving: prefill replicas, decode replicas, and KV transfer.

There are two simulations in sequence. A request arrives at a decode replica when its
prefill is complete and its K and V are transferred. It arrives with its first token, as
a prompt that is one token longer and costs one decode step.

Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxkv import scheduling, validation, workloads
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import NO_LIMIT
from jaxkv.simulation import driver
from jaxkv.simulation.costs import KVTransferred
from jaxkv.simulation.state import Capacity
from jaxkv.simulation.step import Cost, SimulationMember
from jaxkv.workloads import Lengths, Pair, fifo_finish_s, make_workload

HEAD_SIZE = 16
"""Waiting requests visible to the policy."""
MEASURED_SHARE = 0.9
"""Fraction of the simulated time; requests that arrive later are not measured, since
they may be unfinished at its end."""


class Replica(NamedTuple):
    """GPUs that hold one copy of a model.

    Attributes:
      cost: cost of a step.
      capacity: bounds; decode replicas have no token budget.
      num_gpus: tensor-parallel degree.
      kv_bytes: bytes of K and V per token.
    """

    cost: Cost
    capacity: Capacity
    num_gpus: int
    kv_bytes: float


class RequestLoad(NamedTuple):
    """Requests in order of arrival.

    Attributes:
      arrival_s: arrival times in s.
      tokens: lengths of prompts and answers.
    """

    arrival_s: Float[np.ndarray, " requests"]
    tokens: Lengths


class RequestTiming(NamedTuple):
    """Results of requests. Times are in s; NaN for events that did not happen.

    Attributes:
      arrival_s: arrival times; NaN for requests that are not measured.
      first_s: times of the first token.
      finish_s: times of the last token.
      output: answer lengths in tokens.
      transfer_s: durations of KV transfer, queueing included.
      preempted: number of preemptions.
    """

    arrival_s: Float[np.ndarray, " requests"]
    first_s: Float[np.ndarray, " requests"]
    finish_s: Float[np.ndarray, " requests"]
    output: Int[np.ndarray, " requests"]
    transfer_s: Float[np.ndarray, " requests"]
    preempted: int


class PhasePlacement(NamedTuple):
    """Placement of prefill and decode on replicas.

    Attributes:
      prefill: a prefill replica.
      decode: a decode replica.
      num_prefill: number of prefill replicas, used round robin.
      num_decode: number of decode replicas, used round robin.
      link: bandwidth of each GPU in bytes/s.
    """

    prefill: Replica
    decode: Replica
    num_prefill: int
    num_decode: int
    link: float

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all replicas."""
        reads = self.num_prefill * self.prefill.num_gpus
        return reads + self.num_decode * self.decode.num_gpus


@validation.checks_numbers(rate="(0, 1e100]", seed=0)
def sample_requests(
    law: Pair, rate: int | float, seconds: int | float, seed: int
) -> RequestLoad:
    """Samples requests with Poisson arrivals.

    Args:
      law: distribution of lengths. The lengths do not depend on the rate.
      rate: requests per s.
      seconds: duration of the arrivals in s.
      seed: random seed.

    Raises:
      ValueError: a number is out of its range.
    """
    rng = np.random.default_rng(seed)
    num = max(2, round(rate * seconds))
    times, sizes = rng.spawn(2)
    return RequestLoad(
        workloads.poisson(times, rate=rate, num=num), law.draw(sizes, num)
    )


type ReplicaRole = Literal["both", "prefill", "decode"]
"""Phases that a replica serves."""


class Job(NamedTuple):
    """Requests of one replica.

    Attributes:
      replica: the replica.
      role: its phases. Whole prompts are prefilled first, as in early vLLM.
      requests: requests in order of arrival. Requests of a decode replica arrive with
        their first token.
    """

    replica: Replica
    role: ReplicaRole
    requests: RequestLoad


@validation.checks_numbers(seconds=validation.SECONDS)
def simulate_jobs(
    jobs: Sequence[Job],
    seconds: int | float,
    *,
    max_slots: int,
    progress: Progress = QUIET,
) -> list[RequestTiming]:
    """Simulates jobs together in one program.

    Args:
      jobs: the jobs. Requests of decode replicas have at least 2 output tokens.
      seconds: simulated time in s.
      max_slots: largest number of running sequences of a replica.
      progress: progress bar.
    """
    served = driver.simulate(
        driver.stack([_member(job) for job in jobs]),
        max_slots=max_slots,
        head=HEAD_SIZE,
        until_s=seconds,
        progress=progress,
    )
    answers_of_jobs = []
    for i, job in enumerate(jobs):
        arrival_s, tokens = job.requests
        first_s, finish_s = (
            x[i][: arrival_s.size] for x in (served.first_s, served.finish_s)
        )
        # Requests arrive at decode replicas with their first token, and leave prefill
        # replicas with it.
        answers = RequestTiming(
            arrival_s=arrival_s,
            first_s=arrival_s if job.role == "decode" else first_s,
            finish_s=first_s if job.role == "prefill" else finish_s,
            output=tokens.output,
            transfer_s=np.zeros_like(arrival_s),
            preempted=int(served.preempted[i].sum()),
        )
        answers_of_jobs.append(answers)
    return answers_of_jobs


@validation.checks_numbers(seconds=validation.SECONDS)
def simulate_placements(
    pairs: Sequence[tuple[PhasePlacement, RequestLoad]],
    seconds: int | float,
    *,
    max_slots: int,
    progress: Progress = QUIET,
) -> list[RequestTiming]:
    """Simulates disaggregated placements; arguments as for `simulate_jobs`.

    Requests are assigned to replicas round robin: to prefill replicas in order of
    arrival, to decode replicas in order of the end of KV transfer.
    """
    reads = [
        Job(p.prefill, "prefill", select_requests(x, slice(k, None, p.num_prefill)))
        for p, x in pairs
        for k in range(p.num_prefill)
    ]
    read = iter(simulate_jobs(reads, seconds, max_slots=max_slots, progress=progress))
    placement_times = []
    parts = []
    jobs = []
    for p, x in pairs:
        first_s = np.full(x.arrival_s.shape, np.nan)
        for k in range(p.num_prefill):
            first_s[k :: p.num_prefill] = next(read).first_s
        sent_s = transfer_times(p, x, first_s)
        ready_s = first_s + sent_s
        several = x.tokens.output > 1
        finish_s = np.where(several, np.nan, first_s)
        placement_times.append(
            RequestTiming(x.arrival_s, first_s, finish_s, x.tokens.output, sent_s, 0)
        )
        order = np.argsort(ready_s, kind="stable")
        order = order[np.isfinite(ready_s[order]) & several[order]]
        for k in range(p.num_decode):
            indices = order[k :: p.num_decode]
            parts.append((len(placement_times) - 1, indices))
            jobs.append(Job(p.decode, "decode", select_requests(x, indices, ready_s)))
    answers = simulate_jobs(jobs, seconds, max_slots=max_slots, progress=progress)
    for (i, indices), done in zip(parts, answers, strict=True):
        placement_times[i].finish_s[indices] = done.finish_s[: indices.size]
        placement_times[i] = placement_times[i]._replace(
            preempted=placement_times[i].preempted + done.preempted
        )
    return [drop_late_arrivals(x, seconds) for x in placement_times]


@validation.checks_numbers(seconds=validation.SECONDS)
def drop_late_arrivals(answers: RequestTiming, seconds: int | float) -> RequestTiming:
    """Excludes requests that arrive after `MEASURED_SHARE` of the time."""
    late = answers.arrival_s > MEASURED_SHARE * seconds
    return answers._replace(arrival_s=np.where(late, np.nan, answers.arrival_s))


def select_requests(
    requests: RequestLoad,
    which: slice | np.ndarray,
    arrival_s: np.ndarray | None = None,
) -> RequestLoad:
    """Selects requests, optionally with new arrival times."""
    came = requests.arrival_s if arrival_s is None else arrival_s
    tokens = requests.tokens
    return RequestLoad(came[which], Lengths(tokens.prompt[which], tokens.output[which]))


def transfer_times(
    placement: PhasePlacement,
    requests: RequestLoad,
    first_s: Float[np.ndarray, " requests"],
) -> Float[np.ndarray, " requests"]:
    """Returns the duration of each KV transfer in s, queueing included.

    The K and V of a prompt are divided over pairs of GPUs, as many as the smaller
    replica has. Transfers of one prefill replica are sent in sequence.
    """
    p = placement
    lanes = min(p.prefill.num_gpus, p.decode.num_gpus)
    sizes = requests.tokens.prompt * p.prefill.kv_bytes
    service_s = sizes / (p.link * lanes)
    transfer_s = np.full(first_s.shape, np.nan)
    for k in range(p.num_prefill):
        indices = np.arange(k, first_s.size, p.num_prefill)
        indices = indices[np.isfinite(first_s[indices])]
        indices = indices[np.argsort(first_s[indices], kind="stable")]
        done_s = fifo_finish_s(first_s[indices], service_s[indices])
        transfer_s[indices] = done_s - first_s[indices]
    return transfer_s


def _member(job: Job) -> SimulationMember:
    x = job.requests
    receives = job.role == "decode"
    columns = x.arrival_s, x.tokens.prompt, x.tokens.output
    if receives:
        columns = x.arrival_s, x.tokens.prompt + 1, x.tokens.output - 1
    elif job.role == "prefill":
        columns = x.arrival_s, x.tokens.prompt, np.ones_like(x.tokens.output)
    # A workload needs a request; this one arrives after the end of the simulation.
    if not x.arrival_s.size:
        columns = np.array([2e9]), np.array([1]), np.array([1])
    capacity = job.replica.capacity
    if receives:
        capacity = capacity._replace(token_budget=jnp.int32(NO_LIMIT))
    return SimulationMember(
        workload=make_workload(*columns),
        capacity=capacity,
        policy=scheduling.chunked_prefill(whole_prompts=True, first=not receives),
        cost=KVTransferred(job.replica.cost, jnp.asarray(receives)),
    )
