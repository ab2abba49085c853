"""Shortest remaining first: waiting requests in the order of the work left."""

from typing import NamedTuple

from jaxkv.scheduling import fcfs, interface
from jaxkv.scheduling.interface import Counts, Plan


class ShortestRemaining(NamedTuple):
    """Admits requests with the fewest tokens left to compute first.

    Tokens left are the predicted length, or the limit where no length is predicted,
    less the tokens in the prefix cache. Long requests can wait for as long as shorter
    ones arrive. All else is decided as by `inner`, running requests included.

    Source: Schrage 1968, without preemption of running requests; Qiu et al. 2024,
    arXiv:2404.08509 (predicted lengths).
    """

    inner: fcfs.FCFS

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Decides one step."""
        c = interface.skip_unmarked(counts)
        expected = interface.attributes_of(c.waiting_attributes).predicted_length
        return interface.plan_by(self.inner, c, expected - c.waiting_cached)


def shortest_remaining(inner: fcfs.FCFS | None = None) -> ShortestRemaining:
    """Makes a `ShortestRemaining` policy; `inner` None means `fcfs.fcfs()`."""
    return ShortestRemaining(fcfs.fcfs() if inner is None else inner)
