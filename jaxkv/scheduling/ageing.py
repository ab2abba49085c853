"""Priorities with ageing, so that no request starves."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv import validation
from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.interface import Counts, Plan, Policy


class AgeingPriority(NamedTuple):
    """Admits the most urgent request first; urgency grows with the waiting time.

    A request that has waited for `level_ms` is as urgent as a new one whose `priority`
    is smaller by 1. All other decisions are those of `inner`.
    """

    inner: Policy
    level_ms: Int32[Array, ""]
    """Time in ms that outweighs one level of priority, in [1, 1000000]."""

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        c = interface.skip_unmarked(counts)
        a = interface.attributes_of(c.waiting_attributes)
        return interface.plan_by(
            self.inner, c, a.arrival_ms + a.priority * self.level_ms
        )


def ageing_priority(
    *, level_ms: int = 10_000, inner: Policy | None = None
) -> AgeingPriority:
    """Makes an `AgeingPriority` policy; `inner` None means `fcfs()`.

    Raises:
      ValueError: `level_ms` is not in [1, 1000000].
    """
    level_ms = validation.integer(
        "level_ms", level_ms, low=1, below=1_000_001, hint="in [1, 1000000]"
    )
    return AgeingPriority(
        first_come.fcfs() if inner is None else inner, jnp.asarray(level_ms, jnp.int32)
    )
