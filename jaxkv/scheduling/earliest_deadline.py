"""Earliest deadline first: waiting requests in the order of their deadlines."""

from typing import NamedTuple

from jaxkv.scheduling import fcfs, interface
from jaxkv.scheduling.interface import Counts, Plan


class EarliestDeadline(NamedTuple):
    """Admits the request with the earliest deadline first, then those without one.

    A request keeps its place after its deadline has passed. All else is decided as by
    `inner`, running requests included.

    Source: Liu and Layland 1973, section 7, without preemption of running requests.
    """

    inner: fcfs.FCFS

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Decides one step."""
        c = interface.skip_unmarked(counts)
        deadline = interface.attributes_of(c.waiting_attributes).deadline_ms
        return interface.plan_by(self.inner, c, deadline)


def earliest_deadline(inner: fcfs.FCFS | None = None) -> EarliestDeadline:
    """Makes an `EarliestDeadline` policy; `inner` None means `fcfs.fcfs()`."""
    return EarliestDeadline(fcfs.fcfs() if inner is None else inner)
