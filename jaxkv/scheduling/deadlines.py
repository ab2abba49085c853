"""Earliest deadline first: waiting requests in the order of their deadlines."""

from typing import NamedTuple

from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.interface import Counts, Plan


class EarliestDeadline(NamedTuple):
    """Admits the request with the earliest deadline first, then those without one.

    A deadline that has passed still counts in the order. All other decisions are those
    of `inner`.

    Source: Liu and Layland 1973, section 7, without preemption of running requests.
    """

    inner: first_come.FCFS

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        c = interface.skip_unmarked(counts)
        deadline = interface.attributes_of(c.waiting_attributes).deadline_ms
        return interface.plan_by(self.inner, c, deadline)


def earliest_deadline(inner: first_come.FCFS | None = None) -> EarliestDeadline:
    """Makes an `EarliestDeadline` policy; `inner` None means `fcfs()`."""
    return EarliestDeadline(first_come.fcfs() if inner is None else inner)
