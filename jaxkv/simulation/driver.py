"""Runs many simulations to their end, and returns NumPy arrays.

A member is one simulation: workload, capacity, policy and cost. Members are mapped by
`vmap` in parts that are small enough for XLA to run each part on one thread. Parts
advance by `steps_per_call` steps at a time. Of each step, sums weighted by time are
kept in float64; full traces are optional.
"""

import concurrent.futures
import inspect
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import check_policy
from jaxkv.simulation.member_batch import MemberBatch, ProgramSizes
from jaxkv.simulation.results import SimulationResult, select_members
from jaxkv.simulation.step import SimulationMember
from jaxkv.simulation.work import Cost
from jaxkv.workloads import Chains, Dependencies, Workload

STEPS_PER_CALL = 1024
_PLACES_TOGETHER = 1024
"""Slots of all members of a part. XLA distributes operations on more than about 20 kB
over threads, and the hand-over takes longer than the work: see `experiments/LOG.md`."""


def stack(members: Sequence[tuple[Any, ...]]) -> SimulationMember:
    """Stacks members, or tuples of their fields.

    Workloads with fewer requests are padded with empty requests. A cost may be a plain
    function if it is the same one in all members.

    Raises:
      ValueError: there are no members, a policy or cost has another type, or members
        differ in the types of their policies, costs or reservations, or in
        `max_drafts`.
    """
    if not members:
        raise ValueError("members=[] must have at least one member")
    singles = [SimulationMember(*member) for member in members]
    for member in singles:
        check_policy(member.policy)
        validation.instance("cost", member.cost, Cost)
    # A function becomes part of the type, a pytree without leaves.
    singles = [
        x._replace(cost=jax.tree_util.Partial(x.cost))
        if inspect.isfunction(x.cost)
        else x
        for x in singles
    ]
    kinds = {jax.tree.structure(member.workload) for member in singles}
    if len(kinds) > 1:
        raise ValueError(
            "the workloads of all members must have limits, attributes, contexts, "
            "chains and dependencies, or none must"
        )
    for name in ("policy", "cost", "reservation", "acceptance", "eviction"):
        kinds = {jax.tree.structure(getattr(member, name)) for member in singles}
        if len(kinds) > 1:
            raise ValueError(f"{name} must have the same type in all members")
    sizes = {x.acceptance.chances.size for x in singles if x.acceptance is not None}
    if len(sizes) > 1:
        raise ValueError(f"max_drafts must be equal in all members, not {sizes}")
    max_requests = max(member.workload.prompt.shape[0] for member in singles)
    links = [x.workload.dependencies for x in singles]
    sizes = [_dependency_sizes(x) for x in links if x is not None]
    most_links = tuple(max(x) for x in zip(*sizes, strict=True)) or None
    chains = [x.workload.chains for x in singles]
    num_chains = max((x.first.shape[0] for x in chains if x is not None), default=None)
    filled = [
        x._replace(
            workload=pad_workload(x.workload, max_requests, most_links, num_chains)
        )
        for x in singles
    ]
    return jax.tree.map(lambda *x: np.stack(x), *filled)


def _dependency_sizes(d: Dependencies) -> tuple[int, int, int]:
    """Returns columns of `after`, columns of `followers`, and number of lanes."""
    return d.after.shape[1], d.followers.shape[1], d.lane_start.shape[0]


@validation.checks_numbers()
def pad_workload(
    workload: Workload,
    num: int,
    link_sizes: tuple[int, int, int] | None = None,
    num_chains: int | None = None,
) -> Workload:
    """Pads a workload to `num` requests with requests of 0 sequences.

    `link_sizes` are the columns of `after`, the columns of `followers` and the lanes of
    the result, and `num_chains` its chains; None keeps those of the workload.
    """

    def padded(x: Array | np.ndarray, value: int, *sizes: int) -> Any:
        sizes = (*sizes, *np.shape(x)[len(sizes) :])
        widths = [(0, new - old) for new, old in zip(sizes, np.shape(x), strict=True)]
        return np.pad(np.asarray(x), widths, constant_values=value)

    w = workload
    if (d := w.dependencies) is not None:
        width, fan_out, lanes = link_sizes or _dependency_sizes(d)
        d = Dependencies(
            after=padded(d.after, -1, num, width),
            delay=padded(d.delay, 0, num),
            followers=padded(d.followers, -1, num, fan_out),
            lane=padded(d.lane, -1, num),
            lane_start=padded(d.lane_start, -1, lanes),
        )
    if (chains := w.chains) is not None:
        chains = Chains(
            index=padded(chains.index, 0, num),
            first=padded(chains.first, -1, num_chains or chains.first.shape[0]),
        )
    return Workload(
        arrival=padded(w.arrival, np.iinfo(np.int32).max, num),
        prompt=padded(w.prompt, 1, num),
        output=padded(w.output, 1, num),
        samples=padded(w.samples, 0, num),
        clients=w.clients,
        limit=None if w.limit is None else padded(w.limit, 1, num),
        attributes=jax.tree.map(lambda x: padded(x, 0, num), w.attributes),
        context=None if w.context is None else padded(w.context, 0, num),
        dependencies=d,
        chains=chains,
    )


@validation.checks_numbers(since_s=validation.SECONDS, until_s=validation.SECONDS)
def simulate(
    members: SimulationMember,
    *,
    max_slots: int,
    max_samples: int = 1,
    head: int | None = None,
    since_s: float = 0.0,
    until_s: float | None = None,
    keep_trace: bool = False,
    steps_per_call: int = STEPS_PER_CALL,
    progress: Progress = QUIET,
) -> SimulationResult:
    """Simulates every member to the end of its workload.

    Args:
      members: the members, stacked, see `stack`.
      max_slots: largest number of running sequences.
      max_samples: largest number of sequences of a request.
      head: as for `simulation.step`; 16 is faster and changes results little.
      since_s: start of the measurement in s; steps that start earlier do not count in
        means and totals.
      until_s: simulated time at which to stop, in s; None serves all requests. Later
        events are not reported, except that preemptions of the last steps may count.
      keep_trace: True to keep the `SimulatedStep` of every step.
      steps_per_call: steps per call of the compiled program.
      progress: progress bar; if it is stopped, the results so far are returned.

    Returns:
      The results of all members.

    Raises:
      ValueError: the members are not stacked.
      StallError: a policy makes no progress; the message names the member.
    """
    if not isinstance(members, SimulationMember):
        raise ValueError(
            f"members={validation.format_value(members)} must be stacked: "
            "simulate(stack(members), ...)"
        )
    members = jax.tree.map(np.asarray, members)
    num = members.workload.prompt.shape[0]
    size = part_size(num, max_slots)
    num_threads = os.cpu_count() or 1
    num_parts = -(-num // size)
    # Equal sizes share a program; the last member may be simulated twice.
    places = np.minimum(
        np.arange(num_parts)[:, None] + num_parts * np.arange(size), num - 1
    )
    bounds = ProgramSizes(max_slots, max_samples, head, steps_per_call, keep_trace)
    runners = [
        MemberBatch(
            jax.tree.map(lambda x, at=at: x[at], members),
            bounds,
            since_s,
            until_s,
            at.tolist(),
        )
        for at in places
    ]
    for runner in runners:  # in sequence, since the first one compiles for all
        runner.start()
    total = sum(float(runner.num_served.sum()) for runner in runners)
    bar = progress.bar("simulated", total, "requests")
    lock = threading.Lock()

    def finish(runner: MemberBatch) -> SimulationResult:
        while not runner.done.all() and not progress.stopped:
            runner.advance()
            with lock:
                bar(sum(runner.num_behind() for runner in runners))
        return runner.result()

    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        results = list(pool.map(finish, runners))
    every = np.arange(num)
    keep = every % num_parts * size + every // num_parts
    return select_members(results, keep)


@validation.checks_numbers()
def part_size(num: int, max_slots: int) -> int:
    """Returns the number of members that should advance together, out of `num`."""
    num_threads = os.cpu_count() or 1
    turns = -(-num // (num_threads * max(_PLACES_TOGETHER // max_slots, 1)))
    return -(-num // (num_threads * turns))
