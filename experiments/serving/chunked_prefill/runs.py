"""Simulates requests under schedules of prefill, and records token times."""

import math
from collections.abc import Sequence

import numpy as np

from experiments import lab
from experiments.serving.chunked_prefill import settings
from experiments.serving.chunked_prefill.settings import (
    DATASETS,
    MODELS,
    Config,
    System,
)
from jaxkv import clock, simulation, workloads
from jaxkv.simulation import SimulationResult
from jaxkv.workloads import (
    Pair,
    gaps_between_tokens,
    make_workload,
    num_requests_for,
    open_loop,
)

HEAD_SIZE = 16
"""Waiting requests that the policy sees."""
MAX_DELAY_S = 2.0
"""Largest median scheduling delay."""


class PrefillRuns(lab.ResultTable):
    """Latencies of simulated loads."""

    model: lab.Texts = lab.column("served model")
    data: lab.Texts = lab.column("dataset of the lengths")
    system: lab.Texts = lab.column("schedule of prefill", heading="schedule")
    budget: lab.Floats = lab.column("token budget of a step", heading="tokens a step")
    rate: lab.Floats = lab.column("arrivals", heading="requests/s", form="{:.2f}")
    share: lab.Floats = lab.column("rate over the rate at which prefill takes all time")
    ttft_s: lab.Floats = lab.column(
        "median time to first token; elapsed time for requests that have none",
        heading="first token, median",
    )
    delay_s: lab.Floats = lab.column(
        "ttft_s less the prefill time of the median prompt"
    )
    tbt_p50_s: lab.Floats = lab.column(
        "median time between tokens", heading="between tokens, median"
    )
    tbt_p99_s: lab.Floats = lab.column("P99 time between tokens", heading="P99")
    longest_s: lab.Floats = lab.column("longest time between tokens", heading="longest")
    batch: lab.Floats = lab.column("mean number of running sequences")
    preempted: lab.Floats = lab.column("preemptions")


class Capacities(lab.ResultTable):
    """Requests/s that systems sustain."""

    model: lab.Texts = lab.column("served model")
    data: lab.Texts = lab.column("dataset of the lengths")
    system: lab.Texts = lab.column("schedule of prefill")
    strict_per_s: lab.Floats = lab.column("within the strict objective")
    relaxed_per_s: lab.Floats = lab.column("within the relaxed objective")


class Timeline(lab.ResultTable):
    """Time of each token."""

    way: lab.Texts = lab.column("schedule of prefill")
    sequence: lab.Ints = lab.column("sequence of the token")
    time_s: lab.Floats = lab.column("time of the token")


def prefill_bound_rate(model: settings.ServedModel, law: Pair) -> float:
    """Returns the rate in requests/s at which prefill takes all time."""
    prompts = law.draw(np.random.default_rng(0), 2000).prompt
    # Prefill time is quadratic in the length, so 3 lengths determine it.
    sizes = np.array([256.0, 2048.0, float(law.max_length)])
    fit = np.polyfit(sizes, [settings.prompt_s(model, x) for x in sizes], 2)
    return float(1 / np.polyval(fit, prompts).mean())


def num_requests(config: Config) -> int:
    """Returns a number of requests that suffices for every model and dataset.

    One number for all lets them share a compiled program.
    """
    return max(
        num_requests_for(
            max(config.shares) * prefill_bound_rate(MODELS[name], DATASETS[data]),
            config.seconds,
            deviations=4,
        )
        for name in config.models
        for data in config.data
    )


def simulate_systems(
    name: str, data: str, cases: Sequence[tuple[System, float]], config: Config
) -> PrefillRuns:
    """Simulates the same requests under each system and rate, vectorised.

    Args:
      name: name of the model.
      data: name of the dataset.
      cases: systems, each with a rate as a share of `prefill_bound_rate`.
      config: duration and seed.
    """
    model = MODELS[name]
    law = DATASETS[data]
    seconds = config.seconds
    full = prefill_bound_rate(model, law)
    num = num_requests(config)
    members = []
    for system, share in cases:
        rng = np.random.default_rng(config.seed)
        load = open_loop(rng, law, rate=share * full, num=num)
        members.append(system.member(model, law, load))
    served = simulation.simulate(
        simulation.stack(members),
        max_slots=settings.MAX_SLOTS,
        head=HEAD_SIZE,
        until_s=seconds,
        keep_trace=True,
    )
    median_s = settings.prompt_s(model, float(np.median(members[0].workload.prompt)))
    rows = []
    for i, (system, share) in enumerate(cases):
        came = served.arrival_s[i] < seconds
        first_s = np.nan_to_num(served.first_s[i], nan=seconds) - served.arrival_s[i]
        ttft_s = float(np.median(first_s[came])) if came.any() else math.nan
        gaps_s = gaps_between_tokens(*_read_tokens(served, i, seconds)).seconds
        tails = [math.nan] * 3
        if gaps_s.size:
            tails = [*np.percentile(gaps_s, (50, 99)), gaps_s.max()]
        row: list[object] = [name, data, system.name, system.budget_of(law)]
        row += [share * full, share, ttft_s, ttft_s - median_s, *tails]
        rows.append([*row, served.means.batch[i], served.totals.preempted[i]])
    return PrefillRuns.of(rows)


def _read_tokens(
    served: SimulationResult, member: int, until_s: float
) -> tuple[np.ndarray, ...]:
    """Returns the generating sequences and the end of each step of a member."""
    assert served.trace is not None
    trace = served.trace.member(member)
    assert trace.info.num_drawn is None  # speculation is off
    keep = (trace.start_s < until_s) & (trace.info.micros > 0)
    end_s = trace.start_s[keep] + trace.info.micros[keep] / clock.MICROS_PER_SECOND
    return np.asarray(trace.info.drew)[keep], end_s


NUM_DECODING = 3
"""Sequences that decode when the long prompts arrive."""
_LATE_S = (0.35, 1.0)
_SHORT_PROMPT = 256
_LONG = 5000
_ANSWER = 90
_LAST_ANSWER = 30


def simulate_timeline(name: str, data: str, ways: Sequence[System]) -> Timeline:
    """Simulates the arrival of 2 long prompts while 3 sequences decode."""
    load = make_workload(
        np.array([0.0] * NUM_DECODING + [*_LATE_S]),
        np.array([_SHORT_PROMPT] * NUM_DECODING + [_LONG] * 2),
        np.array([_ANSWER] * NUM_DECODING + [_LAST_ANSWER] * 2),
    )
    members = [system.member(MODELS[name], DATASETS[data], load) for system in ways]
    served = simulation.simulate(
        simulation.stack(members), max_slots=8, keep_trace=True
    )
    rows = []
    for i, system in enumerate(ways):
        drew, end_s = _read_tokens(served, i, math.inf)
        step, slot = np.nonzero(drew >= 0)
        rows += [
            (system.name, *x) for x in zip(drew[step, slot], end_s[step], strict=True)
        ]
    return Timeline.of(rows)


def sustained_capacities(loads: PrefillRuns) -> Capacities:
    """Returns the requests/s that each system sustains.

    A rate is sustained if the P99 time between tokens meets the objective and the
    median scheduling delay is at most 2 s.

    Source: Agrawal et al. 2024, arXiv:2403.02310, section 5.1.
    """
    rows = []
    names = zip(loads.model, loads.data, loads.system, strict=True)
    for model, data, system in dict.fromkeys(names):
        selected = loads.where(model=model, data=data, system=system)
        prompt = workloads.capacity(
            selected.rate, selected.delay_s, at_most_s=MAX_DELAY_S
        )
        steady = [
            workloads.capacity(selected.rate, selected.tbt_p99_s, at_most_s=limit_s)
            for limit_s in MODELS[model].limits_s.values()
        ]
        rows.append((model, data, system, *(min(rate, prompt) for rate in steady)))
    return Capacities.of(rows)
