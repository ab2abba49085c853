"""Shortest remaining first: waiting requests in the order of their remaining work."""

from typing import NamedTuple

from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.interface import Counts, Plan


class ShortestRemaining(NamedTuple):
    """Admits requests with the fewest remaining tokens first.

    Remaining tokens are the predicted length, or the limit if no length is predicted,
    minus the tokens in the prefix cache. Long requests can starve while shorter ones
    arrive. All other decisions are those of `inner`.

    Source: Schrage 1968, without preemption of running requests; Qiu et al. 2024,
    arXiv:2404.08509 (predicted lengths).
    """

    inner: first_come.FCFS

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        c = interface.skip_unmarked(counts)
        expected = interface.attributes_of(c.waiting_attributes).predicted_length
        return interface.plan_by(self.inner, c, expected - c.waiting_cached)


def shortest_remaining(inner: first_come.FCFS | None = None) -> ShortestRemaining:
    """Makes a `ShortestRemaining` policy; `inner` None means `fcfs()`."""
    return ShortestRemaining(first_come.fcfs() if inner is None else inner)
