"""Simulated sweeps of what batching gains: by limits of lengths, spread, clients."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.harness import cost_models
from experiments.serving.batching import lectures
from jaxkv.progress import Progress
from jaxkv.scheduling import fcfs, interface, static_batching
from jaxkv.simulation import Capacity, Cost, Served, driver, step
from jaxkv.workloads import Workload, arrivals, lengths

if TYPE_CHECKING:
    from experiments.serving.batching.experiment import Config

SYSTEMS = ("static", "continuous", "paged")
"""Requests that keep to their batch; that come and go, the longest sequence reserved;
that come and go, pages taken as they grow."""
PAGE_SIZE = 16
_ANY = 2**20
"""Rows of a step: as many as there are."""


class Speeds(NamedTuple):
    """Speeds of some systems under some loads; NaN where a run was stopped."""

    value: Float[np.ndarray, " loads"]
    """What was swept."""
    tokens_per_s: Float[np.ndarray, "systems loads seeds"]
    """Tokens drawn per second, until the last request has ended."""
    steps: Float[np.ndarray, "systems loads seeds"]
    """Steps that it took."""
    deviation: Float[np.ndarray, "loads seeds"]
    """Coefficient of variation of the outputs drawn."""

    def means(self) -> Float[np.ndarray, "systems loads"]:
        """Tokens per second, averaged over seeds."""
        return self.tokens_per_s.mean(axis=2)


class Latencies(NamedTuple):
    """How a closed loop fares; requests run side by side, as many as clients."""

    clients: Int[np.ndarray, " loads"]
    tokens_per_s: Float[np.ndarray, " loads"]
    s_per_token: Float[np.ndarray, " loads"]
    """Mean over requests of time from asking to the end, by tokens drawn."""


class Result(NamedTuple):
    """All sweeps, and the lectures' pictures."""

    limits: Speeds
    """Of `SYSTEMS`, by the longest output; of none where it was not swept."""
    deviations: Speeds
    """Of the first two of them in the same slots, by the outputs' spread."""
    clients: Latencies
    static_sequences: lectures.Times
    """S1 to S7."""
    continuous_sequences: lectures.Times
    static_requests: lectures.Times
    """R1 to R5."""
    continuous_requests: lectures.Times
    where: str
    """The cost model, or the device."""
    num_slots: int
    """Of the systems that `deviations` compares."""


class Priced(NamedTuple):
    """A cost model, or a second a step."""

    cost: Cost
    counts_steps: Bool[Array, ""]

    def __call__(self, work: step.Work) -> Array:
        """Prices a step."""
        return jnp.where(self.counts_steps, 1.0, self.cost(work))


class _Member(NamedTuple):
    """A load in the bounds of a system, and whether its steps take a second each."""

    load: Workload
    capacity: Capacity
    counts_steps: bool = False


def run(config: "Config", progress: Progress) -> Result:
    """Simulates everything, the two policies one after the other."""
    cost = cost_models.find(config.cost).cost
    results = []
    for name, policy in (("static", static_batching.static()), ("paged", fcfs.fcfs())):
        members = [*_pictures()]
        for load in (*_limited(config), *_spread(config)):
            members.append(_reserved(config, *load))
        if name == "paged":
            members += [_paged(config, *load) for load in _limited(config)]
            members += [_paged(config, *load) for load in _looped(config)]
        progress.show(f"{name}: {len(members)} simulations side by side")
        results.append(_simulate(config, members, policy, cost, progress))
    return _gather(config, *results)


def pictures(config: "Config", progress: Progress) -> list[lectures.Times]:
    """Simulates the lectures' pictures alone.

    Returns:
      S1 to S7 static and continuous, then R1 to R5, as `Result` has them.
    """
    members, cost = [*_pictures()], cost_models.find(config.cost).cost
    both = [
        _simulate(config, members, policy, cost, progress)
        for policy in (static_batching.static(), fcfs.fcfs())
    ]
    return [_times(*found, index) for index in (0, 1) for found in both]


def spread(config: "Config") -> list[list[Workload]]:
    """The loads of `deviations`, by deviation and seed."""
    loads, num = [load for load, _ in _spread(config)], config.num_seeds
    return [loads[i : i + num] for i in range(0, len(loads), num)]


def equal(prompt: int, output: int, clients: int, *, rounds: int = 4) -> Workload:
    """Equal requests of clients who each ask so often."""
    law = lengths.Pair(
        prompt=lengths.Fixed(tokens=prompt), output=lengths.Fixed(tokens=output)
    )
    rng, num = np.random.default_rng(0), rounds * clients
    return arrivals.closed_loop(rng, law, clients=clients, num=num)


def outputs(config: "Config") -> list[np.ndarray]:
    """Tokens drawn of each load of `limits`, by limit and seed."""
    return [np.asarray(load.output) for load, _ in _limited(config)]


def num_reserved(config: "Config", longest: int) -> int:
    """Slots where each reserves the longest sequence."""
    return min(config.num_places // longest, config.max_slots)


def _limited(config: "Config") -> Iterator[tuple[Workload, int]]:
    for limit in config.limits:
        longest = config.prompt_tokens + limit
        law = lengths.Pair(
            prompt=lengths.Fixed(tokens=config.prompt_tokens),
            output=lengths.Gamma(mean=config.mean_output_tokens, shape=1.0),
            max_length=longest,
        )
        yield from ((_burst(config, law, seed), longest) for seed in _seeds(config))


def _spread(config: "Config") -> Iterator[tuple[Workload, int]]:
    mean, longest = config.mean_output_tokens, config.longest
    for deviation in config.deviations:
        output: Any = lengths.Fixed(tokens=round(mean))
        if deviation > 0:
            output = lengths.Gamma(mean=mean, shape=deviation**-2)
        law = lengths.Pair(
            prompt=lengths.Fixed(tokens=config.prompt_tokens),
            output=output,
            max_length=longest,
            keeps_means=True,
        )
        yield from ((_burst(config, law, seed), longest) for seed in _seeds(config))


def _looped(config: "Config") -> Iterator[tuple[Workload, int]]:
    prompt, output = 32, round(config.mean_output_tokens)
    for clients in config.clients:
        yield equal(prompt, output, clients), prompt + output


def _pictures() -> Iterator[_Member]:
    """The lectures' requests; as many pages as slots, each of a whole sequence."""
    for load, slots in (
        (lectures.sequences(), lectures.NUM_SLOTS),
        (lectures.requests(), lectures.LIMIT),
    ):
        yield _Member(load, _capacity(slots, 16, 16), counts_steps=True)


def _seeds(config: "Config") -> range:
    return range(config.num_seeds)


def _burst(config: "Config", law: lengths.Pair, seed: int) -> Workload:
    tokens = law.draw(np.random.default_rng(seed), config.num_requests)
    return arrivals.make(np.zeros(config.num_requests), *tokens)


def _reserved(config: "Config", load: Workload, longest: int) -> _Member:
    """Reserves the longest sequence for everybody: a page that holds one."""
    slots = num_reserved(config, longest)
    return _Member(load, _capacity(slots, longest, longest))


def _paged(config: "Config", load: Workload, longest: int) -> _Member:
    num_pages = config.num_places // PAGE_SIZE
    return _Member(load, _capacity(num_pages, PAGE_SIZE, longest))


def _capacity(num_pages: int, page_size: int, max_length: int) -> Capacity:
    bounds = (num_pages, page_size, max_length, _ANY, 0)
    return Capacity(*(jnp.int32(x) for x in bounds))


def _simulate(
    config: "Config",
    members: Sequence[_Member],
    policy: interface.Policy,
    cost: Cost,
    progress: Progress,
) -> tuple[Sequence[_Member], Served]:
    stacked = driver.stack(
        [
            (x.load, x.capacity, policy, Priced(cost, jnp.asarray(x.counts_steps)))
            for x in members
        ]
    )
    served = driver.simulate(
        stacked, max_slots=config.max_slots, head=config.max_slots, progress=progress
    )
    return members, served


def _gather(
    config: "Config",
    static: tuple[Sequence[_Member], Served],
    other: tuple[Sequence[_Member], Served],
) -> Result:
    """Sorts what came out by sweep."""
    sizes = [len(x) * config.num_seeds for x in (config.limits, config.deviations)]
    limits, uneven = _ranges(2, sizes)
    paged, loops = _ranges(uneven.stop, [sizes[0], len(config.clients)])
    by_limit = ((static, limits), (other, limits), (other, paged))
    return Result(
        limits=_speeds(config, config.limits, *by_limit),
        deviations=_speeds(
            *(config, config.deviations), (static, uneven), (other, uneven)
        ),
        clients=Latencies(np.array(config.clients), *_latencies(*other, loops)),
        static_sequences=_times(*static, 0),
        continuous_sequences=_times(*other, 0),
        static_requests=_times(*static, 1),
        continuous_requests=_times(*other, 1),
        where=config.cost,
        num_slots=num_reserved(config, config.longest),
    )


def _ranges(start: int, sizes: Sequence[int]) -> list[range]:
    edges = np.cumsum([start, *sizes]).tolist()
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def _speeds(
    config: "Config",
    values: Sequence[float],
    *found: tuple[tuple[Sequence[_Member], Served], range],
) -> Speeds:
    shape = (-1, config.num_seeds)
    rates, steps = [], []
    for (members, served), places in found:
        rates.append([_rate(members[i].load, served, i) for i in places])
        done = served.totals.steps.astype(float)
        steps.append([done[i] if _is_done(served, i) else np.nan for i in places])
    (members, _), places = found[0]
    drawn = [np.asarray(members[i].load.output) for i in places]
    return Speeds(
        np.array(values, float),
        np.array(rates).reshape(len(found), *shape),
        np.array(steps).reshape(len(found), *shape),
        np.array([x.std() / x.mean() for x in drawn]).reshape(shape),
    )


def _latencies(
    members: Sequence[_Member], served: Served, places: range
) -> tuple[np.ndarray, np.ndarray]:
    rates, latencies = [], []
    for i in places:
        took = served.finish_s[i] - served.arrival_s[i]
        took = took[: members[i].load.output.shape[0]]
        rates.append(_rate(members[i].load, served, i))
        latencies.append(np.mean(took / np.asarray(members[i].load.output)))
    return np.array(rates), np.array(latencies)


def _rate(load: Workload, served: Served, index: int) -> float:
    """Tokens drawn per second; NaN if somebody is still to be served."""
    if not _is_done(served, index):
        return np.nan
    return int(load.output.sum()) / float(served.end_s[index])


def _is_done(served: Served, index: int) -> bool:
    asked = np.isfinite(served.arrival_s[index])
    return bool(np.isfinite(served.finish_s[index][asked]).all())


def _times(members: Sequence[_Member], served: Served, index: int) -> lectures.Times:
    num = members[index].load.prompt.shape[0]
    return lectures.times(
        np.nan_to_num(served.first_s[index, :num]),
        np.nan_to_num(served.finish_s[index, :num]),
    )
