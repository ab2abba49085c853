"""Machines that read prompts, machines that decode, and what passes between them.

Two simulations, one behind the other: a request enters the second when the first has
read its prompt and its keys and values have come over. There it brings its first token
along: a prompt one token longer that costs what one step of decoding costs.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.settings import Instance
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import chunked_prefill, interface
from jaxkv.simulation import Capacity, Cost, Members, Work, driver
from jaxkv.workloads import arrivals, lengths

HEAD = 16
"""Requests at the head of the queue that a policy sees."""
COUNTED = 0.9
"""Of the simulated time: who comes later need not be answered by its end."""


class Received(NamedTuple):
    """Prices steps of a machine to which prompts come with their keys and values.

    Nothing is read: a sequence that comes decodes at once, as all others do. Who gives
    way here would be computed again for nothing, so nobody must.
    """

    cost: Cost
    receives: Bool[Array, ""]
    """Whether it is such a machine; another one pays for what it reads."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        none = jnp.zeros_like(work.num_prompt_rows)
        received = work._replace(
            num_decodes=work.num_drawn,
            num_prompt_rows=none,
            decode_context=work.decode_context + work.prompt_context,
            prompt_context=none,
            prompt_squares=jnp.zeros_like(work.prompt_squares),
        )
        return jnp.where(self.receives, self.cost(received), self.cost(work))


class Requests(NamedTuple):
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
      preempted: times that a request gave way.
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
      link: bytes a second that each card sends.
    """

    prefill: Instance
    decode: Instance
    num_prefill: int
    num_decode: int
    link: float = settings.LINK

    @property
    def num_cards(self) -> int:
        """All of them."""
        reads = self.num_prefill * self.prefill.ways
        return reads + self.num_decode * self.decode.ways


def ask(law: lengths.Pair, rate: float, seconds: float, seed: int) -> Requests:
    """Draws requests; lengths do not depend on the rate."""
    rng = np.random.default_rng(seed)
    num = max(2, round(rate * seconds))
    times, sizes = rng.spawn(2)
    return Requests(arrivals.poisson(times, rate=rate, num=num), law.draw(sizes, num))


type Role = Literal["both", "prefill", "decode"]


class Job(NamedTuple):
    """What one machine does.

    Attributes:
      instance: its cards.
      role: the phases that it serves; whole prompts go first, as in vLLM.
      requests: in order; who comes to one that decodes has its first token.
    """

    instance: Instance
    role: Role
    requests: Requests


class Outcome(NamedTuple):
    """What became of a job's requests; NaN for what never happened."""

    first_s: Float[np.ndarray, " requests"]
    finish_s: Float[np.ndarray, " requests"]
    preempted: int


def serve(
    jobs: Sequence[Job], seconds: float, progress: Progress = QUIET
) -> list[Outcome]:
    """Serves jobs side by side, in one program.

    Args:
      jobs: those that decode have requests of two output tokens at least.
      seconds: simulated.
      progress: hears of it.
    """
    served = driver.simulate(
        driver.stack([_member(job) for job in jobs]),
        max_slots=settings.MAX_SLOTS,
        head=HEAD,
        until_s=seconds,
        progress=progress,
    )
    found = []
    for i, job in enumerate(jobs):
        num = job.requests.arrival_s.size
        first_s = served.first_s[i][:num]
        if job.role == "decode":  # the first one came along
            first_s = job.requests.arrival_s
        preempted = int(served.preempted[i].sum())
        found.append(Outcome(first_s, served.finish_s[i][:num], preempted))
    return found


def split(
    asked: Sequence[tuple[Split, Requests]], seconds: float, progress: Progress = QUIET
) -> list[Answers]:
    """Serves loads by machines for either phase.

    Machines of a phase take turns: the first the requests in order of arrival, the
    second in order of readiness.
    """
    reads = [
        Job(p.prefill, "prefill", take(x, slice(k, None, p.num_prefill)))
        for p, x in asked
        for k in range(p.num_prefill)
    ]
    read = iter(serve(reads, seconds, progress))
    firsts, readies, parts, jobs = [], [], [], []
    for p, x in asked:
        first_s = np.full(x.arrival_s.shape, np.nan)
        for k in range(p.num_prefill):
            first_s[k :: p.num_prefill] = next(read).first_s
        ready_s = first_s + transfers(p, x, first_s)
        firsts.append(first_s)
        readies.append(ready_s)
        order = np.argsort(ready_s, kind="stable")
        order = order[np.isfinite(ready_s[order]) & (x.tokens.output[order] > 1)]
        for k in range(p.num_decode):
            mine = order[k :: p.num_decode]
            parts.append(mine)
            jobs.append(Job(p.decode, "decode", take(x, mine, ready_s)))
    done = iter(zip(parts, serve(jobs, seconds, progress), strict=True))
    found = []
    for (p, x), first_s, ready_s in zip(asked, firsts, readies, strict=True):
        finish_s = np.where(x.tokens.output > 1, np.nan, first_s)
        preempted = 0
        for mine, outcome in itertools.islice(done, p.num_decode):
            finish_s[mine] = outcome.finish_s[: mine.size]
            preempted += outcome.preempted
        counted = count(x, Outcome(first_s, finish_s, preempted), seconds)
        found.append(counted._replace(transfer_s=ready_s - first_s))
    return found


def count(requests: Requests, outcome: Outcome, seconds: float) -> Answers:
    """Leaves those out who come near the end, and need not be answered by then."""
    late = requests.arrival_s > COUNTED * seconds
    return Answers(
        arrival_s=np.where(late, np.nan, requests.arrival_s),
        first_s=outcome.first_s,
        finish_s=outcome.finish_s,
        output=requests.tokens.output,
        transfer_s=np.zeros_like(requests.arrival_s),
        preempted=outcome.preempted,
    )


def take(
    requests: Requests, which: slice | np.ndarray, arrival_s: np.ndarray | None = None
) -> Requests:
    """Some of the requests, which may come at another time."""
    came = requests.arrival_s if arrival_s is None else arrival_s
    tokens = requests.tokens
    return Requests(
        came[which], lengths.Lengths(tokens.prompt[which], tokens.output[which])
    )


def transfers(
    placement: Split,
    requests: Requests,
    first_s: Float[np.ndarray, " requests"],
) -> Float[np.ndarray, " requests"]:
    """How long keys and values are on their way.

    Cards of the two sides pair up, as many as the smaller side has, and each pair
    carries its part. What one machine sends goes one after the other.
    """
    p = placement
    lanes = min(p.prefill.ways, p.decode.ways)
    sizes = requests.tokens.prompt * float(settings.kv_bytes(p.prefill.model))
    service_s = sizes / (p.link * lanes)
    found = np.full(first_s.shape, np.nan)
    for k in range(p.num_prefill):
        mine = np.arange(k, first_s.size, p.num_prefill)
        mine = mine[np.isfinite(first_s[mine])]
        mine = mine[np.argsort(first_s[mine], kind="stable")]
        found[mine] = in_turn(first_s[mine], service_s[mine]) - first_s[mine]
    return found


def in_turn(
    arrival_s: Float[np.ndarray, " n"], service_s: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """When each is done, if one after the other is served: Lindley's recursion."""
    # done[i] = max(arrival[i], done[i - 1]) + service[i], unrolled.
    total = np.cumsum(service_s)
    return total + np.maximum.accumulate(arrival_s - (total - service_s))


def _member(job: Job) -> Members:
    x, receives = job.requests, job.role == "decode"
    columns = x.arrival_s, x.tokens.prompt, x.tokens.output
    if receives:
        columns = x.arrival_s, x.tokens.prompt + 1, x.tokens.output - 1
    elif job.role == "prefill":
        columns = x.arrival_s, x.tokens.prompt, np.ones_like(x.tokens.output)
    if not x.arrival_s.size:  # a workload has a request; this one never comes
        columns = np.array([2e9]), np.array([1]), np.array([1])
    budget = interface.NO_LIMIT if receives else settings.TOKEN_BUDGET
    return Members(
        workload=arrivals.make(*columns),
        capacity=Capacity(
            num_pages=jnp.int32(job.instance.num_pages),
            page_size=jnp.int32(settings.PAGE_SIZE),
            max_length=jnp.int32(settings.MAX_LENGTH + 1),
            token_budget=jnp.int32(budget),
            max_swap_pages=jnp.int32(0),
        ),
        policy=chunked_prefill.reading(whole=True, first=not receives),
        cost=Received(job.instance.cost, jnp.asarray(receives)),
    )
