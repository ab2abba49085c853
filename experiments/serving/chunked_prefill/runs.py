"""Serves requests in the ways that prompts can be read, and times every token."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.framework import Floats, Ints, Table, Texts, column
from experiments.serving.chunked_prefill import settings
from experiments.serving.chunked_prefill.settings import Data, Model, System
from jaxkv import clock
from jaxkv.progress import QUIET, Progress
from jaxkv.simulation import Served, driver
from jaxkv.workloads import arrivals, load_curves, metrics

HEAD = 16
"""Requests at the head of the queue that the policy sees."""
MAX_DELAY_S = 2.0
"""Median delay of scheduling, at most."""


class Loads(Table):
    """What became of some loads, a row for each."""

    model: Texts = column("who serves")
    data: Texts = column("what is asked")
    system: Texts = column("how prompts are read", heading="way")
    budget: Floats = column("tokens that a step feeds at most", heading="tokens a step")
    rate: Floats = column("arrivals a second", heading="requests/s", form="{:.2f}")
    share: Floats = column("of the rate at which reading prompts takes all the time")
    ttft_s: Floats = column(
        "median time to the first token; who has none counts with the time so far",
        heading="first token, median",
    )
    delay_s: Floats = column("beyond the time to read the median prompt alone")
    tbt_p50_s: Floats = column(
        "median between tokens", heading="between tokens, median"
    )
    tbt_p99_s: Floats = column("what 99 % of these keep", heading="P99")
    longest_s: Floats = column("the longest stall", heading="longest")
    batch: Floats = column("running sequences, on average")
    preempted: Floats = column("times that one was preempted")


class Timeline(Table):
    """When each token was drawn, a row for each."""

    way: Texts = column("how prompts are read")
    sequence: Ints = column("whose token")
    time_s: Floats = column("when")


def full_rate(model: Model, data: Data) -> float:
    """The rate at which reading prompts, one after the other, takes all the time."""
    drawn = data.law.draw(np.random.default_rng(0), 2000).prompt
    # Quadratic in the length, so three lengths tell the mean.
    lengths_ = np.array([256.0, 2048.0, float(data.max_length)])
    seconds = [settings.prompt_s(model, x) for x in lengths_]
    fit = np.polyfit(lengths_, seconds, 2)
    return float(1 / np.polyval(fit, drawn).mean())


def num_requests(model: Model, data: Data, share: float, seconds: float) -> int:
    """So many that they last, but for a chance of four standard deviations."""
    return load_curves.enough(share * full_rate(model, data), seconds, deviations=4)


def serve(
    model: Model,
    data: Data,
    asked: Sequence[tuple[System, float]],
    *,
    seconds: float,
    seed: int,
    num: int,
    progress: Progress = QUIET,
) -> Loads:
    """Serves the same requests by every system at its rate, all mapped together.

    Args:
      model: what serves.
      data: what is asked.
      asked: systems, each with a share of the full rate.
      seconds: simulated.
      seed: of lengths and arrivals.
      num: requests that there are: enough for the highest rate.
      progress: hears of it.
    """
    full = full_rate(model, data)
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
    median_s = settings.prompt_s(model, float(np.median(members[0].workload.prompt)))
    rows = []
    for i, (system, share) in enumerate(asked):
        came = served.arrival_s[i] < seconds
        first_s = np.nan_to_num(served.first_s[i], nan=seconds) - served.arrival_s[i]
        ttft_s = float(np.median(first_s[came])) if came.any() else math.nan
        gaps_s = gaps(served, i, seconds).seconds
        tails = [math.nan] * 3
        if gaps_s.size:
            tails = [*np.percentile(gaps_s, (50, 99)), gaps_s.max()]
        row: list[Any] = [model.name, data.name, system.name, system.budget_of(data)]
        row += [share * full, share, ttft_s, ttft_s - median_s, *tails]
        rows.append([*row, served.means.batch[i], served.totals.preempted[i]])
    return Loads.of(rows)


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
        end_s, drew = trace.start_s + trace.info.micros / clock.SECOND, trace.info.drew
        step, slot = np.nonzero(np.asarray(drew) >= 0)
        drawn = zip(np.asarray(drew)[step, slot], end_s[step], strict=True)
        rows += [(way.name, *x) for x in drawn]
    return Timeline.of(rows)


def capacity(loads: Loads, at_most_s: float) -> float:
    """The rate at which 99 % of the gaps keep an objective, and nobody waits long.

    Args:
      loads: a system's, of one model and data.
      at_most_s: the objective.

    Source: Agrawal et al. 2024, arXiv:2403.02310, section 5.1: the median delay of
    scheduling is 2 s at most.
    """
    limits = ((loads.tbt_p99_s, at_most_s), (loads.delay_s, MAX_DELAY_S))
    return min(
        metrics.capacity(loads.rate, values, at_most_s=limit)
        for values, limit in limits
    )


def capacities(loads: Loads) -> list[dict[str, Any]]:
    """Requests a second that each system sustains, a row for each."""
    names = zip(loads.model, loads.data, loads.system, strict=True)
    return [
        {"model": str(model), "data": str(data), "system": str(system)}
        | {
            f"{name}_per_s": capacity(
                loads.where(model=model, data=data, system=system), limit_s
            )
            for name, limit_s in settings.MODELS[model].limits_s.items()
        }
        for model, data, system in dict.fromkeys(names)
    ]
