"""Priorities with ageing, so that no request starves."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv import validation
from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.interface import Counts, OrderedQueue, Policy


class AgeingPriority(NamedTuple):
    """The most urgent request first; urgency grows with the waiting time.

    A request that has waited for `level_ms` is as urgent as a new one whose `priority`
    is smaller by 1.
    """

    level_ms: Int32[Array, ""]
    """Time in ms that outweighs one level of priority, in [1, 1000000]."""

    @property
    def overtaking_s(self) -> float:
        """The time in s that outweighs all 2,000 levels of priority."""
        return 2.0 * float(self.level_ms)

    def __call__(self, counts: Counts) -> Int32[Array, "*head"]:
        """Returns the arrival times, later by `level_ms` for each level."""
        a = interface.attributes_of(counts.waiting_attributes)
        return a.arrival_ms + a.priority * self.level_ms


def ageing_priority(
    *, level_ms: int = 10_000, inner: Policy | None = None
) -> OrderedQueue:
    """Makes a policy with the order of `AgeingPriority`; `inner` None means `fcfs()`.

    Raises:
      ValueError: `level_ms` is not in [1, 1000000], or `inner` is not a policy.
    """
    level_ms = validation.integer(
        "level_ms", level_ms, low=1, below=1_000_001, hint="in [1, 1000000]"
    )
    return first_come.order_queue(
        AgeingPriority(jnp.asarray(level_ms, jnp.int32)), inner
    )
