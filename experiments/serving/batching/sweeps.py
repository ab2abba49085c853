"""What batching is swept over, simulated: limits of lengths, their spread, clients."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.framework import Floats, Ints, Record, Table, column, table, units
from experiments.harness import named_costs
from experiments.serving.batching import lectures
from jaxkv import validation
from jaxkv.progress import Progress
from jaxkv.scheduling import fcfs, static_batching
from jaxkv.simulation import Capacity, Cost, SimulationResult, driver, step
from jaxkv.workloads import Workload, arrivals, lengths

SYSTEMS = ("static", "continuous", "paged")
"""Requests that keep to their batch; that come and go, the longest sequence reserved;
that come and go, pages taken as they grow."""
PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The machine, and the requests that it serves."""

    model: str = ""
    """A folder, or a bundled model: serves it here, in place of simulated sweeps of
    deviations and clients, and leaves the limits out."""
    cost: str = "opt-13b-a100-40gb"
    """What a step takes: a name as `named_costs` has it."""
    num_places: int = 15_728
    """Token places of K and V; those of a 13B model on 40 GB."""
    prompt_tokens: int = 512
    """Of every prompt."""
    mean_output_tokens: float = 128.0
    """Of outputs, before they are limited."""
    limits: tuple[int, ...] = (32, 128, 512, 1536)
    """Outputs are exponential, those above the limit drawn anew; ascending."""
    deviations: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    """Coefficients of variation of outputs of the same mean; ascending."""
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Who ask for an answer again and again, prompts of 32 tokens; ascending."""
    num_requests: int = 1000
    """Requests of each load, all there when the clock starts."""
    num_seeds: int = 3
    """Draws of the lengths."""
    max_slots: int = 64
    """Sequences that run at once at most."""

    def __post_init__(self) -> None:
        """Refuses what cannot be simulated."""
        validation.at_least(self, "prompt_tokens", "num_requests", "num_seeds")
        validation.at_least(self, "max_slots", "mean_output_tokens")
        validation.ascending(self, "limits", "clients", low=1)
        validation.ascending(self, "deviations", low=0)
        if self.num_places < self.longest:
            raise ValueError(
                f"num_places={self.num_places!r} must hold a prompt and its longest "
                "output, "
                f"{self.longest} tokens"
            )
        if self.clients[-1] > self.max_slots:
            raise ValueError(
                f"clients={self.clients!r} must be at most max_slots={self.max_slots!r}"
            )

    @property
    def longest(self) -> int:
        """Tokens of a prompt with the longest output."""
        return self.prompt_tokens + self.limits[-1]


class Speeds(Record):
    """Speeds of some systems under some loads; NaN where a run was stopped."""

    value: Float[np.ndarray, " loads"] = column("what was swept")
    tokens_per_s: Float[np.ndarray, "systems loads seeds"] = column(
        "drawn, until the last request has ended"
    )
    steps: Float[np.ndarray, "systems loads seeds"] = column("that it took")
    deviation: Float[np.ndarray, "loads seeds"] = column(
        "coefficient of variation of the outputs drawn"
    )

    @property
    def means(self) -> Float[np.ndarray, "systems loads"]:
        """Tokens per second, averaged over seeds."""
        return self.tokens_per_s.mean(axis=2)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Means over seeds, a row for each load; `name` is what was swept."""
        found = {name: self.value, "measured deviation": self.deviation.mean(axis=1)}
        for system, rates in zip(SYSTEMS, self.means, strict=False):
            found[f"{system}_tokens_per_s"] = rates
        found["gain"] = self.means[-1] / self.means[0]
        found["fewer_steps"] = self.steps[0].sum(axis=1) / self.steps[-1].sum(axis=1)
        return table.by_row(found)


class Latencies(Table):
    """How equal requests of so many clients fare, side by side: a row for each."""

    clients: Ints = column("requests side by side")
    tokens_per_s: Floats = column("drawn")
    s_per_token: Floats = column(
        "mean over requests of time from asking to the end, by tokens drawn",
        key="token_s",
        heading="token",
        form=units.seconds,
    )


class Run(NamedTuple):
    """What became of a load; NaN where somebody is still to be served."""

    output: Int[np.ndarray, " requests"]
    """Tokens drawn of each request."""
    tokens_per_s: float = np.nan
    steps: float = np.nan
    s_per_token: float = np.nan
    times: lectures.Times = lectures.Times.of([])


class Priced(NamedTuple):
    """A cost model, or a second a step."""

    cost: Cost
    counts_steps: Bool[Array, ""]

    def __call__(self, work: step.Work) -> Array:
        """Prices a step."""
        return jnp.where(self.counts_steps, 1.0, self.cost(work))


type Runs = dict[str, list[Run]]
"""Of what was simulated under one policy, by name: the pictures' loads, or sweeps."""


def simulate(config: Config, progress: Progress, *, sweeps: bool) -> tuple[Runs, Runs]:
    """Simulates the lectures' pictures, and the sweeps.

    Args:
      config: the loads.
      progress: hears of it.
      sweeps: whether these are simulated, too; else they have no runs.

    Returns:
      Static batching's "pictures", "limits" and "deviations"; continuous batching's,
      and behind them "paged", its limits with pages, and "clients".
    """

    def reserved(longest: int) -> Capacity:
        # The longest sequence is reserved for everybody: a page that holds one.
        return _bounds(num_reserved(config, longest), longest, longest)

    def paged(longest: int) -> Capacity:
        return _bounds(config.num_places // PAGE_SIZE, PAGE_SIZE, longest)

    def looped(config: Config) -> Iterator[tuple[Workload, int]]:
        prompt, output = 32, round(config.mean_output_tokens)
        for clients in config.clients:
            yield equal(prompt, output, clients), prompt + output

    groups: dict[str, list[_Member]] = {
        # As many pages as slots, each of a whole sequence.
        "pictures": [
            (lectures.sequences(), _bounds(lectures.NUM_SLOTS, 16, 16), True),
            (lectures.requests(), _bounds(lectures.LIMIT, 16, 16), True),
        ]
    }
    for name, loads, bounds in (
        ("limits", limited, reserved),
        ("deviations", spread, reserved),
        ("paged", limited, paged),
        ("clients", looped, paged),
    ):
        asked = loads(config) if sweeps else ()
        groups[name] = [(load, bounds(longest), False) for load, longest in asked]
    names = ("pictures", "limits", "deviations")
    static = {name: groups[name] for name in names}
    return (
        _simulate(config, static, static_batching.static(), progress),
        _simulate(config, groups, fcfs.fcfs(), progress),
    )


type _Member = tuple[Workload, Capacity, bool]
"""A load in the bounds of a system, and whether its steps take a second each."""


def _bounds(num_pages: int, page_size: int, max_length: int) -> Capacity:
    """Bounds of a system whose steps feed as many rows as there are."""
    return Capacity.of(
        num_pages=num_pages,
        page_size=page_size,
        max_length=max_length,
        token_budget=2**20,
    )


def speeds(config: Config, values: Sequence[float], *systems: list[Run]) -> Speeds:
    """Lines up the runs of systems, each by value and seed."""
    shape = (len(systems), len(values), config.num_seeds)
    rates = [[run.tokens_per_s for run in runs] for runs in systems]
    steps = [[run.steps for run in runs] for runs in systems]
    deviation = [run.output.std() / run.output.mean() for run in systems[0]]
    return Speeds(
        np.array(values, float),
        np.array(rates).reshape(shape),
        np.array(steps, float).reshape(shape),
        np.array(deviation).reshape(shape[1:]),
    )


def latencies(config: Config, runs: list[Run]) -> Latencies:
    """Lines up the runs of clients, those that there are."""
    pairs = zip(config.clients, runs, strict=False)
    return Latencies.of((n, run.tokens_per_s, run.s_per_token) for n, run in pairs)


def equal(prompt: int, output: int, clients: int, *, rounds: int = 4) -> Workload:
    """Equal requests of clients who each ask so often."""
    law = lengths.Pair(
        prompt=lengths.Fixed(tokens=prompt), output=lengths.Fixed(tokens=output)
    )
    rng, num = np.random.default_rng(0), rounds * clients
    return arrivals.closed_loop(rng, law, clients=clients, num=num)


def num_reserved(config: Config, longest: int) -> int:
    """Slots where each reserves the longest sequence."""
    return min(config.num_places // longest, config.max_slots)


def limited(config: Config) -> Iterator[tuple[Workload, int]]:
    """The loads of `limits` by limit and seed, and tokens of their longest sequence."""
    output = lengths.Gamma(mean=config.mean_output_tokens, shape=1.0)
    for limit in config.limits:
        longest = config.prompt_tokens + limit
        yield from _bursts(config, output, longest, keeps_means=False)


def spread(config: Config) -> Iterator[tuple[Workload, int]]:
    """The loads of `deviations`, by deviation and seed, as `limited`."""
    mean = config.mean_output_tokens
    for deviation in config.deviations:
        output: Any = lengths.Fixed(tokens=round(mean))
        if deviation > 0:
            output = lengths.Gamma(mean=mean, shape=deviation**-2)
        yield from _bursts(config, output, config.longest, keeps_means=True)


def _bursts(
    config: Config, output: Any, longest: int, *, keeps_means: bool
) -> Iterator[tuple[Workload, int]]:
    """Loads whose requests are all there from the start, one for each seed."""
    law = lengths.Pair(
        prompt=lengths.Fixed(tokens=config.prompt_tokens),
        output=output,
        max_length=longest,
        keeps_means=keeps_means,
    )
    for seed in range(config.num_seeds):
        tokens = law.draw(np.random.default_rng(seed), config.num_requests)
        yield arrivals.make(np.zeros(config.num_requests), *tokens), longest


def _simulate(
    config: Config, groups: dict[str, list[_Member]], policy: Any, progress: Progress
) -> Runs:
    cost = named_costs.find(config.cost).cost
    members = [x for group in groups.values() for x in group]
    progress.show(f"{len(members)} simulations side by side")
    stacked = driver.stack(
        [
            (load, bounds, policy, Priced(cost, jnp.asarray(counts_steps)))
            for load, bounds, counts_steps in members
        ]
    )
    served = driver.simulate(
        stacked, max_slots=config.max_slots, head=config.max_slots, progress=progress
    )
    runs = (_run(load, served, i) for i, (load, *_) in enumerate(members))
    return {name: [next(runs) for _ in group] for name, group in groups.items()}


def _run(load: Workload, served: SimulationResult, index: int) -> Run:
    output = np.asarray(load.output)
    arrival_s, first_s, finish_s = (
        x[index, : output.size]
        for x in (served.arrival_s, served.first_s, served.finish_s)
    )
    is_done = np.isfinite(finish_s[np.isfinite(arrival_s)]).all()
    ends = (np.nan_to_num(x).round() for x in (first_s, finish_s))
    return Run(
        output,
        int(output.sum()) / float(served.end_s[index]) if is_done else np.nan,
        float(served.totals.steps[index]) if is_done else np.nan,
        np.mean((finish_s - arrival_s) / output),
        lectures.Times(*ends),
    )
