"""Serves requests in the ways that prompts can be read, and times every token."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.framework import Floats, Ints, Table, Texts, column
from experiments.serving.chunked_prefill import settings
from experiments.serving.chunked_prefill.settings import DATA, MODELS, Config, System
from jaxkv import clock
from jaxkv.simulation import SimulationResult, driver
from jaxkv.workloads import arrivals, lengths, load_curves, metrics

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


class Capacities(Table):
    """Requests a second that systems sustain, a row for each."""

    model: Texts = column("that is served")
    data: Texts = column("whose lengths")
    system: Texts = column("how prompts are read")
    strict_per_s: Floats = column("within the strict objective")
    relaxed_per_s: Floats = column("within the relaxed one")


class Timeline(Table):
    """When each token was drawn, a row for each."""

    way: Texts = column("how prompts are read")
    sequence: Ints = column("whose token")
    time_s: Floats = column("when")


def full_rate(model: settings.Model, law: lengths.Pair) -> float:
    """The rate at which reading prompts, one after the other, takes all the time."""
    drawn = law.draw(np.random.default_rng(0), 2000).prompt
    # Quadratic in the length, so three lengths tell the mean.
    sizes = np.array([256.0, 2048.0, float(law.max_length)])
    fit = np.polyfit(sizes, [settings.prompt_s(model, x) for x in sizes], 2)
    return float(1 / np.polyval(fit, drawn).mean())


def num_requests(config: Config) -> int:
    """Enough for every model and data: so many that they share a program."""
    return max(
        load_curves.enough(
            max(config.shares) * full_rate(MODELS[name], DATA[data]),
            config.seconds,
            deviations=4,
        )
        for name in config.models
        for data in config.data
    )


def serve(
    name: str, data: str, asked: Sequence[tuple[System, float]], config: Config
) -> Loads:
    """Serves the same requests by every system at its rate, all mapped together.

    Args:
      name: of the model.
      data: what is asked.
      asked: systems, each with a share of the full rate.
      config: how long, and the seed.
    """
    model, law, seconds = MODELS[name], DATA[data], config.seconds
    full, num = full_rate(model, law), num_requests(config)
    members = []
    for system, share in asked:
        rng = np.random.default_rng(config.seed)
        load = arrivals.open_loop(rng, law, rate=share * full, num=num)
        members.append(system.member(model, law, load))
    served = driver.simulate(
        driver.stack(members),
        max_slots=settings.MAX_SLOTS,
        head=HEAD,
        until_s=seconds,
        keep_trace=True,
    )
    median_s = settings.prompt_s(model, float(np.median(members[0].workload.prompt)))
    rows = []
    for i, (system, share) in enumerate(asked):
        came = served.arrival_s[i] < seconds
        first_s = np.nan_to_num(served.first_s[i], nan=seconds) - served.arrival_s[i]
        ttft_s = float(np.median(first_s[came])) if came.any() else math.nan
        gaps_s = metrics.gaps_between_tokens(*_drawn(served, i, seconds)).seconds
        tails = [math.nan] * 3
        if gaps_s.size:
            tails = [*np.percentile(gaps_s, (50, 99)), gaps_s.max()]
        row: list[Any] = [name, data, system.name, system.budget_of(law)]
        row += [share * full, share, ttft_s, ttft_s - median_s, *tails]
        rows.append([*row, served.means.batch[i], served.totals.preempted[i]])
    return Loads.of(rows)


def _drawn(
    served: SimulationResult, member: int, until_s: float
) -> tuple[np.ndarray, ...]:
    """Whose tokens each step drew, and its end, of the steps of one member."""
    assert served.trace is not None
    trace = served.trace.member(member)
    assert trace.info.num_drawn is None  # nobody speculates here
    keep = (trace.start_s < until_s) & (trace.info.micros > 0)
    end_s = trace.start_s[keep] + trace.info.micros[keep] / clock.SECOND
    return np.asarray(trace.info.drew)[keep], end_s


PATIENTS = 3
"""Sequences that decode when others come."""
_LATE_S = (0.35, 1.0)
_SHORT, _LONG, _ANSWER, _LAST = 256, 5000, 90, 30


def timeline(name: str, data: str, ways: Sequence[System]) -> Timeline:
    """Lets two long prompts come while three sequences decode."""
    load = arrivals.make(
        np.array([0.0] * PATIENTS + [*_LATE_S]),
        np.array([_SHORT] * PATIENTS + [_LONG] * 2),
        np.array([_ANSWER] * PATIENTS + [_LAST] * 2),
    )
    members = [way.member(MODELS[name], DATA[data], load) for way in ways]
    served = driver.simulate(driver.stack(members), max_slots=8, keep_trace=True)
    rows = []
    for i, way in enumerate(ways):
        drew, end_s = _drawn(served, i, math.inf)
        step, slot = np.nonzero(drew >= 0)
        rows += [
            (way.name, *x) for x in zip(drew[step, slot], end_s[step], strict=True)
        ]
    return Timeline.of(rows)


def capacities(loads: Loads) -> Capacities:
    """Requests a second that each system sustains.

    It is the rate at which 99 % of the gaps keep an objective, and nobody waits long.

    Source: Agrawal et al. 2024, arXiv:2403.02310, section 5.1: the median delay of
    scheduling is 2 s at most.
    """
    rows = []
    names = zip(loads.model, loads.data, loads.system, strict=True)
    for model, data, system in dict.fromkeys(names):
        here = loads.where(model=model, data=data, system=system)
        prompt = metrics.capacity(here.rate, here.delay_s, at_most_s=MAX_DELAY_S)
        steady = [
            metrics.capacity(here.rate, here.tbt_p99_s, at_most_s=limit_s)
            for limit_s in MODELS[model].limits_s.values()
        ]
        rows.append((model, data, system, *(min(rate, prompt) for rate in steady)))
    return Capacities.of(rows)
