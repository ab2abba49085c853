"""What an experiment with a prefix cache found, as columns."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class Loads(NamedTuple):
    """The workloads, an entry for each.

    Attributes:
      name: what they are.
      num_requests: how many prompts.
      num_pages: pages of all prompts, each counted every time.
      num_distinct: pages that somebody has to compute.
      longest: pages of the longest prompt.
      page_size: tokens that a page stands for.
    """

    name: np.ndarray
    num_requests: Int[np.ndarray, " loads"]
    num_pages: Int[np.ndarray, " loads"]
    num_distinct: Int[np.ndarray, " loads"]
    longest: Int[np.ndarray, " loads"]
    page_size: Int[np.ndarray, " loads"]

    @property
    def best(self) -> np.ndarray:
        """The highest hit rate there is: every page is computed once: [loads]."""
        return 1 - self.num_distinct / self.num_pages


class Runs(NamedTuple):
    """All servings, an entry for each.

    Attributes:
      workload: name of the workload.
      order: "fcfs", "cached_first" or "depth_first".
      eviction: "lru", "fifo" or "random".
      pool: pages.
      num_cached: pages found, summed over prompts.
      most_delayed: places by which a request was served after its turn, at most.
    """

    workload: np.ndarray
    order: np.ndarray
    eviction: np.ndarray
    pool: Int[np.ndarray, " runs"]
    num_cached: Int[np.ndarray, " runs"]
    most_delayed: Int[np.ndarray, " runs"]


class Curve(NamedTuple):
    """Runs of one workload that differ in the pool alone, by its size.

    Attributes:
      pool: pages.
      rate: pages found / pages of all prompts.
      most_delayed: as in `Runs`.
    """

    pool: np.ndarray
    rate: np.ndarray
    most_delayed: np.ndarray


def curve(
    loads: Loads, runs: Runs, i: int, order: str, eviction: str | None = None
) -> Curve:
    """Picks the runs of workload `i` in an order; of the first eviction if None.

    The pool that holds everything is left out: there all orders are the same.
    """
    here = (runs.workload == loads.name[i]) & (runs.order == order)
    here &= runs.pool <= loads.num_distinct[i]
    if here.any():
        here &= runs.eviction == (eviction or runs.eviction[here][0])
    at = np.flatnonzero(here)
    at = at[np.argsort(runs.pool[at])]
    rate = runs.num_cached[at] / loads.num_pages[i]
    return Curve(runs.pool[at], rate, runs.most_delayed[at])


def columns(kind: Any, rows: list[dict[str, Any]]) -> Any:
    """Turns rows into the columns of a NamedTuple, empty if there are none."""
    return kind(*(np.array([row[name] for row in rows]) for name in kind._fields))
