"""How much of what prompts have in common does a prefix cache find, at which size?

Requests that all wait are served one at a time by the engine, with its own scheduler,
page pool and prefix cache, and a model that costs nothing. Their order is that of
arrival; or whoever finds most in the cache goes first, among the first in the queue
(`fcfs.fcfs(cached_first=True)`); or the tree of all prompts is walked depth first,
for which one must know all of them: then every page is computed once, which is the
best there is.

Hit rates are pages found / pages of all prompts. A pool is measured against the pages
that are distinct: one that holds them all never evicts. All of it takes ten minutes of
one core.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Claim, Part
from experiments.serving.prefix_caching import drawing, published, serving, workloads
from experiments.serving.prefix_caching.results import Loads, Runs, columns
from experiments.serving.prefix_caching.serving import EVICTIONS, Eviction, Server
from experiments.serving.prefix_caching.workloads import Prompts
from jaxkv import validation
from jaxkv.progress import QUIET, Progress

PANEL_SIZE_INCHES = drawing.SIZE_INCHES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The prompts, and the caches they meet."""

    trace: str = "traces/mooncake_synthetic.jsonl"
    """A recording in Mooncake's format: a path, here or below the folder that the
    environment variable JAXKV_DATA names; empty for none."""
    num_users: int = 200
    """Conversations; 0 for none."""
    num_turns: int = 6
    """Turns of each."""
    num_tasks: int = 57
    """Tasks of few-shot questions; 0 for none."""
    num_questions: int = 20
    """Questions of each."""
    shares: tuple[float, ...] = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    """Pages of the pool, as shares of the distinct ones. Beside these stand the fewest
    that hold the longest prompt, and as many as hold everything."""
    window: int = 32
    """Waiting requests that are seen by who lets go first whoever finds most."""
    evictions: tuple[Eviction, ...] = EVICTIONS
    """Who is evicted, in order of arrival: the page that was not used for longest, the
    one that entered first, or anyone. The other orders evict by the first of these."""
    seed: int = 0
    """Of the prompts that are made up."""

    def __post_init__(self) -> None:
        """Refuses what leaves nothing to serve, or no cache."""
        validation.at_least(self, "num_users", "num_tasks", "seed", low=0)
        validation.at_least(self, "num_turns", "num_questions", "window")
        if not (self.trace or self.num_users or self.num_tasks):
            raise ValueError("trace, num_users and num_tasks leave no prompts")
        validation.within(self, "shares", low=0, high=1, ends="()")
        if not self.evictions or not {*self.evictions} <= {*EVICTIONS}:
            raise ValueError(f"{self.evictions=} must be of {', '.join(EVICTIONS)}")


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        trace="",
        num_users=6,
        num_turns=4,
        num_tasks=5,
        num_questions=8,
        shares=(1 / 4, 1 / 2),
        window=8,
    ),
}


class Result(NamedTuple):
    """What was found."""

    loads: Loads
    runs: Runs


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Serves every workload in every order with every pool; ended early, what is done.

    Raises:
      ValueError: the trace is not there, or not a recording of prefixes.
    """
    loads = list(_workloads(config))
    settings = [
        (load, pool, order, eviction)
        for load in loads
        for pool in _pools(load, config)
        for order, eviction in _orders(config, is_whole=pool > load.num_distinct)
    ]
    most = max(load.num_distinct for load in loads) + 1
    longest = max(load.longest for load in loads)
    server = Server(serving.bounds(most, longest, config.window))
    rows: list[dict[str, Any]] = []
    for load, pool, order, eviction in progress.track(settings, "serving", "runs"):
        turns = list(range(len(load.page_ids)))
        if order == "depth_first":
            turns = workloads.depth_first(load.page_ids)
        hits = server.serve(
            [load.page_ids[i] for i in turns],
            num_pages=pool,
            cached_first=order == "cached_first",
            eviction=eviction,
            progress=progress,
        )
        if hits is None:
            break
        # `turn` counts from the order in which they were handed over.
        waited = hits.turn - np.asarray(turns)
        rows.append(
            {
                "workload": load.name,
                "order": order,
                "eviction": eviction,
                "pool": pool,
                "num_cached": hits.num_cached.sum(),
                "most_delayed": max(0, waited.max()),
            }
        )
    return Result(
        loads=Loads(*map(np.array, zip(*map(_described, loads), strict=True))),
        runs=columns(Runs, rows),
    )


def plot(ax: Any, result: Result) -> None:
    """Draws hit rates against the size of the pool, a chart for each workload."""
    drawing.draw(ax, result.loads, result.runs)


def claims(result: Result) -> list[Claim]:
    """Holds what must be so, and what was published, against ours."""
    return published.claims(result.loads, result.runs)


def metrics(result: Result) -> dict[str, Any]:
    """Lists workloads and runs, a row each."""
    return published.metrics(result.loads, result.runs)


def summary(result: Result) -> list[Part]:
    """Puts hit rates in a table for each workload."""
    return published.summary(result.loads, result.runs)


def _workloads(config: Config) -> Iterator[Prompts]:
    if config.trace:
        yield workloads.recorded(config.trace)
    if config.num_users:
        yield workloads.chats(config.num_users, config.num_turns, config.seed)
    if config.num_tasks:
        yield workloads.few_shot(config.num_tasks, config.num_questions, config.seed)


def _pools(load: Prompts, config: Config) -> list[int]:
    """Pools in pages; one is always taken by the token that is computed in any case."""
    least = load.longest + 1
    some = (round(share * load.num_distinct) for share in config.shares)
    return sorted({least, *(max(least, num) for num in some), load.num_distinct + 1})


def _orders(config: Config, *, is_whole: bool) -> Iterator[tuple[str, Eviction]]:
    """Orders, and who is evicted; where everything fits, neither matters."""
    usual = config.evictions[0]
    if is_whole:
        yield "fcfs", usual
        return
    yield "depth_first", usual
    yield "cached_first", usual
    for eviction in config.evictions:
        yield "fcfs", eviction


def _described(load: Prompts) -> tuple[Any, ...]:
    num = len(load.page_ids)
    sizes = (load.num_pages, load.num_distinct, load.longest)
    return (load.name, num, *sizes, load.page_size)
