"""Shortest remaining first: waiting requests in the order of their remaining work."""

import math
from typing import NamedTuple

from jaxtyping import Array, Int32

from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.interface import Counts, OrderedQueue, Policy


class ShortestRemaining(NamedTuple):
    """Requests with the fewest remaining tokens first.

    Remaining tokens are the predicted length, or the limit if no length is predicted,
    minus the tokens in the prefix cache. Long requests can starve while shorter ones
    arrive.

    Source: Schrage 1968, without preemption of running requests; Qiu et al. 2024,
    arXiv:2404.08509 (predicted lengths).
    """

    overtaking_s = math.inf

    def __call__(self, counts: Counts) -> Int32[Array, " head"]:
        """Returns the remaining tokens."""
        a = interface.attributes_of(counts.waiting_attributes)
        return a.predicted_length - counts.waiting_cached


def shortest_remaining(inner: Policy | None = None) -> OrderedQueue:
    """Makes a policy with the order of `ShortestRemaining`; `inner` None is `fcfs()`.

    Raises:
      ValueError: `inner` is not a policy.
    """
    return first_come.order_queue(ShortestRemaining(), inner)
