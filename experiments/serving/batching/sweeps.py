"""Simulated sweeps of batching: output limits, spread of outputs, and clients."""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments import lab
from experiments.harness import find_cost_model
from experiments.serving.batching import lectures
from jaxkv import scheduling, simulation
from jaxkv.scheduling import Policy
from jaxkv.simulation import Capacity, Cost, SimulationResult, Work
from jaxkv.workloads import (
    Fixed,
    Gamma,
    Pair,
    Workload,
    closed_loop,
    make_workload,
)

SYSTEMS = ("static", "continuous", "paged")
"""Static batching; continuous batching that reserves the longest sequence; continuous
batching with pages allocated on demand."""
PAGE_SIZE = 16


class Config(lab.ConfigRecord):
    """The simulated machine and its requests."""

    model: str = ""
    """Model folder or bundled model to serve on this machine; empty simulates. A model
    replaces the simulated sweeps of deviations and clients and omits the limits."""
    cost: str = "opt-13b-a100-40gb"
    """Name of the cost model of a step, see `named_costs`."""
    num_places: int = 15_728
    """KV cache size in tokens; the default is that of a 13B model in 40 GB."""
    prompt_tokens: lab.PositiveInt = 512
    """Tokens of every prompt."""
    mean_output_tokens: Annotated[float, lab.Range(1)] = 128.0
    """Mean output tokens, before outputs are limited."""
    limits: lab.AscendingInts = (32, 128, 512, 1536)
    """Output limits in tokens, ascending; outputs are exponential, and redrawn above
    the limit."""
    deviations: lab.AscendingFloats = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    """Coefficients of variation of outputs of equal mean, ascending."""
    clients: lab.AscendingInts = (1, 2, 4, 8, 16, 32, 64)
    """Concurrent clients with prompts of 32 tokens, ascending; each sends its next
    request when the last is answered."""
    num_requests: lab.PositiveInt = 1000
    """Requests of each load, all of which arrive at 0 s."""
    num_seeds: lab.PositiveInt = 3
    """Independent draws of the lengths."""
    max_slots: lab.PositiveInt = 64
    """Largest number of sequences that run at once."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
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
        """Tokens of a prompt and its longest output."""
        return self.prompt_tokens + self.limits[-1]


class ThroughputSweep(lab.ResultRecord):
    """Throughput of several systems under several loads; NaN where a run stopped."""

    value: Float[np.ndarray, " loads"] = lab.column("swept value")
    tokens_per_s: Float[np.ndarray, "systems loads seeds"] = lab.column(
        "generated tokens over the time until the last request ended"
    )
    steps: Float[np.ndarray, "systems loads seeds"] = lab.column("steps taken")
    deviation: Float[np.ndarray, "loads seeds"] = lab.column(
        "coefficient of variation of the drawn outputs"
    )

    @property
    def means(self) -> Float[np.ndarray, "systems loads"]:
        """Tokens per second, averaged over seeds."""
        return self.tokens_per_s.mean(axis=2)

    def rows(self, name: str) -> list[lab.Row]:
        """Returns the means over seeds, one row per load; `name` heads the values."""
        columns = {name: self.value, "measured deviation": self.deviation.mean(axis=1)}
        for system, rates in zip(SYSTEMS, self.means, strict=False):
            columns[f"{system}_tokens_per_s"] = rates
        columns["gain"] = self.means[-1] / self.means[0]
        columns["fewer_steps"] = self.steps[0].sum(axis=1) / self.steps[-1].sum(axis=1)
        return lab.to_rows(columns)


class ClientLatencies(lab.ResultTable):
    """Throughput and latency of equal requests by number of clients."""

    clients: lab.Ints = lab.column("requests side by side")
    tokens_per_s: lab.Floats = lab.column("generated tokens")
    s_per_token: lab.Floats = lab.column(
        "mean over requests of latency / output tokens",
        key="token_s",
        heading="token",
        form=lab.format_seconds,
    )


class LoadResult(NamedTuple):
    """Result of one load; NaN if a request was not answered."""

    output: Int[np.ndarray, " requests"]
    """Output tokens of each request."""
    tokens_per_s: float = np.nan
    steps: float = np.nan
    s_per_token: float = np.nan
    times: lectures.IterationSpans = lectures.IterationSpans.of([])


class SwitchedCost(NamedTuple):
    """A cost model, or 1 s for every step."""

    cost: Cost
    counts_steps: Bool[Array, ""]

    def __call__(self, work: Work) -> Array:
        """Returns the seconds of a step."""
        return jnp.where(self.counts_steps, 1.0, self.cost(work))


type LoadResults = dict[str, list[LoadResult]]
"""Results of one policy by name of the sweep, or "pictures"."""


def simulate_sweeps(
    config: Config, progress: lab.Progress, *, sweeps: bool
) -> tuple[LoadResults, LoadResults]:
    """Simulates the lectures' pictures and the sweeps.

    Args:
      config: the loads.
      progress: receives progress.
      sweeps: True to simulate the sweeps as well as the pictures.

    Returns:
      Results of static batching for "pictures", "limits" and "deviations", and those of
      continuous batching, with "paged" (the limits with pages) and "clients" as well.
    """

    def reserved(longest: int) -> Capacity:
        # Every request reserves the longest sequence: one page holds a sequence.
        return _bounds(num_reserved_slots(config, longest), longest, longest)

    def paged(longest: int) -> Capacity:
        return _bounds(config.num_places // PAGE_SIZE, PAGE_SIZE, longest)

    def looped(config: Config) -> Iterator[tuple[Workload, int]]:
        prompt = 32
        output = round(config.mean_output_tokens)
        for clients in config.clients:
            yield equal_requests(prompt, output, clients), prompt + output

    groups: dict[str, list[_LoadCase]] = {
        # A page holds a whole sequence, so the number of pages is the number of slots.
        "pictures": [
            (lectures.lecture_sequences(), _bounds(lectures.NUM_SLOTS, 16, 16), True),
            (lectures.lecture_requests(), _bounds(lectures.MAX_BATCH, 16, 16), True),
        ]
    }
    for name, loads, bounds in (
        ("limits", limited_loads, reserved),
        ("deviations", spread_loads, reserved),
        ("paged", limited_loads, paged),
        ("clients", looped, paged),
    ):
        cases = loads(config) if sweeps else ()
        groups[name] = [(load, bounds(longest), False) for load, longest in cases]
    names = ("pictures", "limits", "deviations")
    static = {name: groups[name] for name in names}
    return (
        _simulate(config, static, scheduling.static(), progress),
        _simulate(config, groups, scheduling.fcfs(), progress),
    )


type _LoadCase = tuple[Workload, Capacity, bool]
"""A load, the capacity of its system, and True if each of its steps takes 1 s."""


def _bounds(num_pages: int, page_size: int, max_length: int) -> Capacity:
    """Returns the capacity of a system without a limit on rows of a step."""
    return Capacity.of(
        num_pages=num_pages,
        page_size=page_size,
        max_length=max_length,
        token_budget=2**20,
    )


def throughput_sweep(
    config: Config, values: Sequence[float], *systems: list[LoadResult]
) -> ThroughputSweep:
    """Collects the runs of several systems, each by value and seed."""
    shape = (len(systems), len(values), config.num_seeds)
    rates = [[run.tokens_per_s for run in runs] for runs in systems]
    steps = [[run.steps for run in runs] for runs in systems]
    deviation = [run.output.std() / run.output.mean() for run in systems[0]]
    return ThroughputSweep(
        np.array(values, float),
        np.array(rates).reshape(shape),
        np.array(steps, float).reshape(shape),
        np.array(deviation).reshape(shape[1:]),
    )


def client_latencies(config: Config, runs: list[LoadResult]) -> ClientLatencies:
    """Collects the runs of the client sweep."""
    pairs = zip(config.clients, runs, strict=False)
    return ClientLatencies.of(
        (n, run.tokens_per_s, run.s_per_token) for n, run in pairs
    )


def equal_requests(
    prompt: int, output: int, clients: int, *, rounds: int = 4
) -> Workload:
    """Returns a closed-loop workload: equal requests, `rounds` per client."""
    law = Pair(prompt=Fixed(tokens=prompt), output=Fixed(tokens=output))
    rng = np.random.default_rng(0)
    num = rounds * clients
    return closed_loop(rng, law, clients=clients, num=num)


def num_reserved_slots(config: Config, longest: int) -> int:
    """Returns the number of slots if each reserves the longest sequence."""
    return min(config.num_places // longest, config.max_slots)


def limited_loads(config: Config) -> Iterator[tuple[Workload, int]]:
    """Yields the loads of `limits` by limit and seed, with their longest sequence."""
    output = Gamma(mean=config.mean_output_tokens, shape=1.0)
    for limit in config.limits:
        longest = config.prompt_tokens + limit
        yield from _bursts(config, output, longest, keeps_means=False)


def spread_loads(config: Config) -> Iterator[tuple[Workload, int]]:
    """Yields the loads of `deviations` by deviation and seed, as `limited_loads`."""
    mean = config.mean_output_tokens
    for deviation in config.deviations:
        output: Fixed | Gamma = Fixed(tokens=round(mean))
        if deviation > 0:
            output = Gamma(mean=mean, shape=deviation**-2)
        yield from _bursts(config, output, config.longest, keeps_means=True)


def _bursts(
    config: Config, output: Fixed | Gamma, longest: int, *, keeps_means: bool
) -> Iterator[tuple[Workload, int]]:
    """Yields one load per seed, all of whose requests arrive at 0 s."""
    law = Pair(
        prompt=Fixed(tokens=config.prompt_tokens),
        output=output,
        max_length=longest,
        keeps_means=keeps_means,
    )
    for seed in range(config.num_seeds):
        tokens = law.draw(np.random.default_rng(seed), config.num_requests)
        yield make_workload(np.zeros(config.num_requests), *tokens), longest


def _simulate(
    config: Config,
    groups: dict[str, list[_LoadCase]],
    policy: Policy,
    progress: lab.Progress,
) -> LoadResults:
    cost = find_cost_model(config.cost).cost
    members = [x for group in groups.values() for x in group]
    progress.show(f"{len(members)} simulations side by side")
    stacked = simulation.stack(
        [
            (load, bounds, policy, SwitchedCost(cost, jnp.asarray(counts_steps)))
            for load, bounds, counts_steps in members
        ]
    )
    served = simulation.simulate(
        stacked, max_slots=config.max_slots, head=config.max_slots, progress=progress
    )
    runs = (_run(load, served, i) for i, (load, *_) in enumerate(members))
    return {name: [next(runs) for _ in group] for name, group in groups.items()}


def _run(load: Workload, served: SimulationResult, index: int) -> LoadResult:
    output = np.asarray(load.output)
    arrival_s, first_s, finish_s = (
        x[index, : output.size]
        for x in (served.arrival_s, served.first_s, served.finish_s)
    )
    is_done = np.isfinite(finish_s[np.isfinite(arrival_s)]).all()
    ends = (np.nan_to_num(x).round() for x in (first_s, finish_s))
    return LoadResult(
        output,
        int(output.sum()) / float(served.end_s[index]) if is_done else np.nan,
        float(served.totals.steps[index]) if is_done else np.nan,
        np.mean((finish_s - arrival_s) / output),
        lectures.IterationSpans(*ends),
    )
