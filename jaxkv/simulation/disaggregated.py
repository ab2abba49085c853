"""Replicas that read prompts, replicas that decode, and what passes between them.

Two simulations, one behind the other: a request enters the second when the first has
read its prompt and its keys and values have come over. There it brings its first token
along: a prompt one token longer that costs what one step of decoding costs.

Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import chunked_prefill, interface
from jaxkv.simulation import driver
from jaxkv.simulation.costs import Received
from jaxkv.simulation.state import Capacity
from jaxkv.simulation.step import Cost, Members
from jaxkv.workloads import arrivals, lengths, metrics

HEAD = 16
"""Requests at the head of the queue that a policy sees."""
COUNTED = 0.9
"""Of the simulated time: who comes later need not be answered by its end."""


class Replica(NamedTuple):
    """GPUs that hold one copy of a model.

    Attributes:
      cost: how long its steps take.
      capacity: its bounds; of those that decode the token budget does not count.
      num_gpus: that share every layer, its tensor-parallel degree.
      kv_bytes: bytes of keys and values of a token.
    """

    cost: Cost
    capacity: Capacity
    num_gpus: int
    kv_bytes: float


class ReplicaRequests(NamedTuple):
    """Requests in order of arrival.

    Attributes:
      arrival_s: when each comes.
      tokens: their lengths.
    """

    arrival_s: Float[np.ndarray, " requests"]
    tokens: lengths.Lengths


class Answers(NamedTuple):
    """What became of them; NaN for what never happened.

    Attributes:
      arrival_s: as asked; NaN of those that do not count.
      first_s: when the first token was drawn.
      finish_s: when the last one was.
      output: tokens.
      transfer_s: how long keys and values were on their way, waiting included.
      preempted: times that a request was preempted.
    """

    arrival_s: Float[np.ndarray, " requests"]
    first_s: Float[np.ndarray, " requests"]
    finish_s: Float[np.ndarray, " requests"]
    output: Int[np.ndarray, " requests"]
    transfer_s: Float[np.ndarray, " requests"]
    preempted: int


class Split(NamedTuple):
    """A placement of the two phases.

    Attributes:
      prefill: what reads.
      decode: what decodes.
      num_prefill: copies of the former, which take turns.
      num_decode: copies of the latter, which take turns.
      link: bytes a second that each GPU sends.
    """

    prefill: Replica
    decode: Replica
    num_prefill: int
    num_decode: int
    link: float

    @property
    def num_gpus(self) -> int:
        """All of them."""
        reads = self.num_prefill * self.prefill.num_gpus
        return reads + self.num_decode * self.decode.num_gpus


def ask(
    law: lengths.Pair, rate: int | float, seconds: int | float, seed: int
) -> ReplicaRequests:
    """Draws requests; lengths do not depend on the rate."""
    rng = np.random.default_rng(seed)
    num = max(2, round(rate * seconds))
    times, sizes = rng.spawn(2)
    return ReplicaRequests(
        arrivals.poisson(times, rate=rate, num=num), law.draw(sizes, num)
    )


type Role = Literal["both", "prefill", "decode"]


class Job(NamedTuple):
    """What one replica does.

    Attributes:
      replica: its GPUs.
      role: the phases that it serves; whole prompts go first, as in vLLM.
      requests: in order; who comes to one that decodes has its first token.
    """

    replica: Replica
    role: Role
    requests: ReplicaRequests


def serve(
    jobs: Sequence[Job],
    seconds: int | float,
    *,
    max_slots: int,
    progress: Progress = QUIET,
) -> list[Answers]:
    """Serves jobs side by side, in one program.

    Args:
      jobs: those that decode have requests of two output tokens at least.
      seconds: simulated.
      max_slots: sequences that run at once on a replica at most.
      progress: hears of it.
    """
    served = driver.simulate(
        driver.stack([_member(job) for job in jobs]),
        max_slots=max_slots,
        head=HEAD,
        until_s=seconds,
        progress=progress,
    )
    found = []
    for i, job in enumerate(jobs):
        arrival_s, tokens = job.requests
        first_s, finish_s = (
            x[i][: arrival_s.size] for x in (served.first_s, served.finish_s)
        )
        # Who comes to decode has its first token; who only reads has nothing more.
        answers = Answers(
            arrival_s=arrival_s,
            first_s=arrival_s if job.role == "decode" else first_s,
            finish_s=first_s if job.role == "prefill" else finish_s,
            output=tokens.output,
            transfer_s=np.zeros_like(arrival_s),
            preempted=int(served.preempted[i].sum()),
        )
        found.append(answers)
    return found


def split(
    asked: Sequence[tuple[Split, ReplicaRequests]],
    seconds: int | float,
    *,
    max_slots: int,
    progress: Progress = QUIET,
) -> list[Answers]:
    """Serves loads by replicas for either phase; arguments as those of `serve`.

    Replicas of a phase take turns: the first the requests in order of arrival, the
    second in order of readiness.
    """
    reads = [
        Job(p.prefill, "prefill", select_requests(x, slice(k, None, p.num_prefill)))
        for p, x in asked
        for k in range(p.num_prefill)
    ]
    read = iter(serve(reads, seconds, max_slots=max_slots, progress=progress))
    found, parts, jobs = [], [], []
    for p, x in asked:
        first_s = np.full(x.arrival_s.shape, np.nan)
        for k in range(p.num_prefill):
            first_s[k :: p.num_prefill] = next(read).first_s
        sent_s = transfers(p, x, first_s)
        ready_s, several = first_s + sent_s, x.tokens.output > 1
        finish_s = np.where(several, np.nan, first_s)
        found.append(
            Answers(x.arrival_s, first_s, finish_s, x.tokens.output, sent_s, 0)
        )
        order = np.argsort(ready_s, kind="stable")
        order = order[np.isfinite(ready_s[order]) & several[order]]
        for k in range(p.num_decode):
            mine = order[k :: p.num_decode]
            parts.append((len(found) - 1, mine))
            jobs.append(Job(p.decode, "decode", select_requests(x, mine, ready_s)))
    answers = serve(jobs, seconds, max_slots=max_slots, progress=progress)
    for (i, mine), done in zip(parts, answers, strict=True):
        found[i].finish_s[mine] = done.finish_s[: mine.size]
        found[i] = found[i]._replace(preempted=found[i].preempted + done.preempted)
    return [counted(x, seconds) for x in found]


def counted(answers: Answers, seconds: int | float) -> Answers:
    """Leaves those out who come near the end, and need not be answered by then."""
    late = answers.arrival_s > COUNTED * seconds
    return answers._replace(arrival_s=np.where(late, np.nan, answers.arrival_s))


def select_requests(
    requests: ReplicaRequests,
    which: slice | np.ndarray,
    arrival_s: np.ndarray | None = None,
) -> ReplicaRequests:
    """Some of the requests, which may come at another time."""
    came = requests.arrival_s if arrival_s is None else arrival_s
    tokens = requests.tokens
    return ReplicaRequests(
        came[which], lengths.Lengths(tokens.prompt[which], tokens.output[which])
    )


def transfers(
    placement: Split,
    requests: ReplicaRequests,
    first_s: Float[np.ndarray, " requests"],
) -> Float[np.ndarray, " requests"]:
    """How long keys and values are on their way.

    GPUs of the two sides pair up, as many as the smaller side has, and each pair
    carries its part. What one replica sends goes one after the other.
    """
    p = placement
    lanes = min(p.prefill.num_gpus, p.decode.num_gpus)
    sizes = requests.tokens.prompt * p.prefill.kv_bytes
    service_s = sizes / (p.link * lanes)
    found = np.full(first_s.shape, np.nan)
    for k in range(p.num_prefill):
        mine = np.arange(k, first_s.size, p.num_prefill)
        mine = mine[np.isfinite(first_s[mine])]
        mine = mine[np.argsort(first_s[mine], kind="stable")]
        done_s = metrics.fifo_finish_s(first_s[mine], service_s[mine])
        found[mine] = done_s - first_s[mine]
    return found


def _member(job: Job) -> Members:
    x, receives = job.requests, job.role == "decode"
    columns = x.arrival_s, x.tokens.prompt, x.tokens.output
    if receives:
        columns = x.arrival_s, x.tokens.prompt + 1, x.tokens.output - 1
    elif job.role == "prefill":
        columns = x.arrival_s, x.tokens.prompt, np.ones_like(x.tokens.output)
    if not x.arrival_s.size:  # a workload has a request; this one never comes
        columns = np.array([2e9]), np.array([1]), np.array([1])
    capacity = job.replica.capacity
    if receives:
        capacity = capacity._replace(token_budget=jnp.int32(interface.NO_LIMIT))
    return Members(
        workload=arrivals.make_workload(*columns),
        capacity=capacity,
        policy=chunked_prefill.reading(whole=True, first=not receives),
        cost=Received(job.replica.cost, jnp.asarray(receives)),
    )
