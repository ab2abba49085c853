"""Earliest deadline first: waiting requests in the order of their deadlines."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.interface import Counts, OrderedQueue, Policy


class EarliestDeadline(NamedTuple):
    """The request with the earliest deadline first, then those without one.

    A deadline that has passed still counts in the order.

    Source: Liu and Layland 1973, section 7, without preemption of running requests.
    """

    overtaking_s = math.inf

    def __call__(self, counts: Counts) -> Int32[Array, "*head"]:
        """Returns the deadlines."""
        a = interface.attributes_of(counts.waiting_attributes)
        return jnp.asarray(a.deadline_ms, jnp.int32)


def earliest_deadline(inner: Policy | None = None) -> OrderedQueue:
    """Makes a policy with the order of `EarliestDeadline`; `inner` None means `fcfs()`.

    Raises:
      ValueError: `inner` is not a policy.
    """
    return first_come.order_queue(EarliestDeadline(), inner)
