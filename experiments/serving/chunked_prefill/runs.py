"""Serves requests in the ways that prompts can be read, and times every token."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.serving.chunked_prefill import settings
from experiments.serving.chunked_prefill.settings import Data, Model, System
from jaxkv import clock
from jaxkv.progress import QUIET, Progress
from jaxkv.simulation import Served, driver
from jaxkv.workloads import arrivals, metrics

HEAD = 16
"""Requests at the head of the queue that the policy sees."""


class Loads(NamedTuple):
    """What became of some loads, a row for each."""

    model: np.ndarray
    data: np.ndarray
    system: np.ndarray
    budget: np.ndarray
    """Tokens that a step feeds at most."""
    rate: np.ndarray
    """Requests a second."""
    share: np.ndarray
    """Of the rate at which reading prompts alone would fill the machine."""
    ttft_s: np.ndarray
    """Median time to the first token; who has none counts with the time so far."""
    delay_s: np.ndarray
    """How much longer that is than reading the median prompt alone."""
    tbt_p50_s: np.ndarray
    """Median time between tokens."""
    tbt_p99_s: np.ndarray
    """What 99 % of these keep."""
    longest_s: np.ndarray
    """The longest stall."""
    batch: np.ndarray
    """Sequences that run, on average."""
    preempted: np.ndarray
    """Times that one gave way."""


class Timeline(NamedTuple):
    """When each token was drawn, a row for each."""

    way: np.ndarray
    sequence: np.ndarray
    time_s: np.ndarray


def join(parts: Sequence[Loads]) -> Loads:
    """Puts tables under each other."""
    names = [np.empty(0, "U1")] * 3
    none = Loads(*names, *[np.empty(0)] * (len(Loads._fields) - len(names)))
    return Loads(*map(np.concatenate, zip(none, *parts, strict=True)))


def full_rate(model: Model, data: Data) -> float:
    """The rate at which reading prompts, one after the other, takes all the time."""
    drawn = data.law.draw(np.random.default_rng(0), 2000).prompt
    # Quadratic in the length, so three lengths tell the mean.
    lengths_ = np.array([256.0, 2048.0, float(data.max_length)])
    seconds = [settings.prompt_s(model, x) for x in lengths_]
    fit = np.polyfit(lengths_, seconds, 2)
    return float(1 / np.polyval(fit, drawn).mean())


def serve(
    model: Model,
    data: Data,
    name: str,
    asked: Sequence[tuple[System, float]],
    *,
    seconds: float,
    seed: int,
    num: int | None = None,
    progress: Progress = QUIET,
) -> Loads:
    """Serves the same requests by every system at its rate, all mapped together.

    Args:
      model: what serves.
      data: what is asked.
      name: of the data.
      asked: systems, each with a share of the full rate.
      seconds: simulated.
      seed: of lengths and arrivals.
      num: requests that there are; enough for the highest rate by default.
      progress: hears of it.
    """
    full = full_rate(model, data)
    num = num or num_requests(full * max(share for _, share in asked), seconds)
    members = []
    for system, share in asked:
        rng = np.random.default_rng(seed)
        load = arrivals.open_loop(rng, data.law, rate=share * full, num=num)
        members.append(system.member(model, data, load))
    served = driver.simulate(
        driver.stack(members),
        max_slots=settings.MAX_SLOTS,
        head=HEAD,
        until_s=seconds,
        keep_trace=True,
        progress=progress,
    )
    median = settings.prompt_s(model, float(np.median(members[0].workload.prompt)))
    rows = []
    for i, (system, share) in enumerate(asked):
        seen = measure(served, i, seconds)
        start = (model.name, name, system.name, system.budget_of(data))
        rows.append((*start, share * full, share, seen[0], seen[0] - median, *seen[1:]))
    return Loads(*(np.asarray(x) for x in zip(*rows, strict=True)))


def num_requests(rate: float, seconds: float) -> int:
    """So many that they last, but for a chance of four standard deviations."""
    mean = rate * seconds
    return math.ceil(mean + 4 * math.sqrt(mean) + 1)


def measure(served: Served, member: int, until_s: float) -> tuple[float, ...]:
    """Median time to first token; between tokens: median, P99, longest; batch."""
    arrival_s, first_s = served.arrival_s[member], served.first_s[member]
    came = arrival_s < until_s
    first_s = np.where(np.isnan(first_s), until_s, first_s)
    ttft_s = np.median((first_s - arrival_s)[came]) if came.any() else np.nan
    _, gaps_s = gaps(served, member, until_s)
    between = (np.nan,) * 3
    if gaps_s.size:
        between = (*np.percentile(gaps_s, (50, 99)), gaps_s.max())
    return (
        float(ttft_s),
        *(float(x) for x in between),
        float(served.means.batch[member]),
        int(served.totals.preempted[member]),
    )


def gaps(served: Served, member: int, until_s: float) -> metrics.Gaps:
    """Times between tokens of all sequences of one member."""
    assert served.trace is not None
    trace = served.trace.member(member)
    keep = (trace.start_s < until_s) & (trace.info.micros > 0)
    end_s = trace.start_s[keep] + trace.info.micros[keep] / clock.SECOND
    return metrics.gaps_between_tokens(np.asarray(trace.info.drew)[keep], end_s)


PATIENTS = 3
"""Sequences that decode when others come."""
_LATE_S = (0.35, 1.0)
_SHORT, _LONG, _ANSWER, _LAST = 256, 5000, 90, 30


def timeline(model: Model, data: Data, ways: Sequence[System]) -> Timeline:
    """Lets two long prompts come while three sequences decode."""
    load = arrivals.make(
        np.array([0.0] * PATIENTS + [*_LATE_S]),
        np.array([_SHORT] * PATIENTS + [_LONG] * 2),
        np.array([_ANSWER] * PATIENTS + [_LAST] * 2),
    )
    served = driver.simulate(
        driver.stack([way.member(model, data, load) for way in ways]),
        max_slots=8,
        keep_trace=True,
    )
    assert served.trace is not None
    rows = []
    for i, way in enumerate(ways):
        trace = served.trace.member(i)
        end_s = trace.start_s + trace.info.micros / clock.SECOND
        step, slot = np.nonzero(np.asarray(trace.info.drew) >= 0)
        drew = np.asarray(trace.info.drew)[step, slot]
        rows += [(way.name, *x) for x in zip(drew, end_s[step], strict=True)]
    names, sequences, times = zip(*rows, strict=True)
    return Timeline(np.array(names), np.array(sequences), np.array(times))


def capacity(
    loads: Loads, system: str, model: str, data: str, at_most_s: float
) -> float:
    """The rate at which 99 % of the gaps keep an objective, and nobody waits long.

    Source: Agrawal et al. 2024, arXiv:2403.02310, section 5.1: the median delay of
    scheduling is 2 s at most.
    """
    here = (loads.system == system) & (loads.model == model) & (loads.data == data)
    rows = jax.tree.map(lambda x: x[here], loads)
    if not rows.rate.size:
        return math.nan
    limits = ((rows.tbt_p99_s, at_most_s), (rows.delay_s, MAX_DELAY_S))
    return min(
        metrics.capacity(rows.rate, values, at_most_s=limit) for values, limit in limits
    )


MAX_DELAY_S = 2.0
