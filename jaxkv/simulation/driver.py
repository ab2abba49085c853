"""Runs many simulations to their end, and hands back NumPy arrays.

Members, each with its workload, bounds, policy and cost, are mapped together, in parts
so small that XLA runs each on one thread. They advance some steps at a time, and of
each step only what is asked for is kept: sums weighted by time, in float64.
"""

import concurrent.futures
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.progress import QUIET, Progress
from jaxkv.simulation import served
from jaxkv.simulation.members import Bounds, Part
from jaxkv.simulation.served import Served
from jaxkv.simulation.step import Members
from jaxkv.workloads import Workload

STEPS_PER_CALL = 1024
_PLACES_TOGETHER = 1024
"""Slots of all members of one program. XLA divides operations on more than some 20 kB
over threads, and a hand-over takes longer than such work: see `experiments/LOG.md`."""


def stack(members: Sequence[tuple[Any, ...]]) -> Members:
    """Stacks members, or tuples of what they hold.

    Workloads of fewer requests are filled up with none.

    Raises:
      ValueError: there are none, policies or costs are not of one kind, or acceptances
        not of one size.
    """
    if not members:
        raise ValueError("there is nothing to simulate")
    alone = [Members(*member) for member in members]
    kinds = {jax.tree.structure(member.workload) for member in alone}
    if len(kinds) > 1:
        raise ValueError(
            "a workload with limits or attributes cannot be mapped with one without"
        )
    for what in ("policy", "cost", "reservation", "acceptance"):
        kinds = {jax.tree.structure(getattr(member, what)) for member in alone}
        if len(kinds) > 1:
            article = "an" if what[0] in "aeiou" else "a"
            raise ValueError(
                f"{article} {what} of one kind cannot be mapped with another"
            )
    laws = [x.acceptance.chances.shape for x in alone if x.acceptance is not None]
    if len(set(laws)) > 1:
        raise ValueError("acceptances of one max_drafts cannot be mapped with others")
    most = max(member.workload.prompt.shape[0] for member in alone)
    filled = [x._replace(workload=fill(x.workload, most)) for x in alone]
    return jax.tree.map(lambda *x: np.stack(x), *filled)


def fill(workload: Workload, num: int) -> Workload:
    """Adds requests of no sequences, which nobody serves, until there are `num`."""
    short = num - workload.prompt.shape[0]

    def padded(x: Any, value: int) -> Any:
        widths = [(0, short)] + [(0, 0)] * (np.ndim(x) - 1)
        return np.pad(np.asarray(x), widths, constant_values=value)

    w = workload
    return Workload(
        arrival=padded(w.arrival, np.iinfo(np.int32).max),
        prompt=padded(w.prompt, 1),
        output=padded(w.output, 1),
        samples=padded(w.samples, 0),
        clients=w.clients,
        limit=None if w.limit is None else padded(w.limit, 1),
        attributes=jax.tree.map(lambda x: padded(x, 0), w.attributes),
    )


def simulate(
    members: Members,
    *,
    max_slots: int,
    max_samples: int = 1,
    head: int | None = None,
    since_s: float = 0.0,
    until_s: float | None = None,
    keep_trace: bool = False,
    steps_per_call: int = STEPS_PER_CALL,
    progress: Progress = QUIET,
) -> Served:
    """Serves every member's workload.

    Args:
      members: what is simulated.
      max_slots: sequences that run at once at most.
      max_samples: sequences that a request may have.
      head: as for `simulation.step`; 16 changes little and is faster.
      since_s: steps that start before do not count in means, totals and trace.
      until_s: simulated time at which to stop; None serves everybody. What happens
        later is not told, but preemptions of a request may be some steps ahead.
      keep_trace: whether to keep what every step did.
      steps_per_call: steps between two looks of the host.
      progress: hears of it; when the person stops, what there is comes back.

    Returns:
      What became of the requests.

    Raises:
      StallError: a policy makes no progress; the message names the member.
    """
    members = jax.tree.map(np.asarray, members)
    num = members.workload.prompt.shape[0]
    size, num_threads = part_size(num, max_slots), os.cpu_count() or 1
    num_parts = -(-num // size)
    # Of equal size, so that they share a program; the last member may be there twice.
    places = np.minimum(
        np.arange(num_parts)[:, None] + num_parts * np.arange(size), num - 1
    )
    bounds = Bounds(max_slots, max_samples, head, steps_per_call, keep_trace)
    runners = [
        Part(
            jax.tree.map(lambda x, at=at: x[at], members),
            bounds,
            since_s,
            until_s,
            at.tolist(),
        )
        for at in places
    ]
    for runner in runners:  # one after the other: the first one compiles for all
        runner.start()
    total = sum(float(runner.num_served.sum()) for runner in runners)
    bar, lock = progress.bar("simulated", total, "requests"), threading.Lock()

    def finish(runner: Part) -> Served:
        while not runner.done.all() and not progress.stopped:
            runner.advance()
            with lock:
                bar(sum(runner.num_behind() for runner in runners))
        return runner.served()

    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        results = list(pool.map(finish, runners))
    every = np.arange(num)
    keep = every % num_parts * size + every // num_parts
    return served.join(results, keep)


def part_size(num: int, max_slots: int) -> int:
    """How many of `num` members should advance together, as one program."""
    num_threads = os.cpu_count() or 1
    turns = -(-num // (num_threads * max(_PLACES_TOGETHER // max_slots, 1)))
    return -(-num // (num_threads * turns))
