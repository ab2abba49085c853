"""Fair share: requests of sessions with fewer running sequences are admitted first."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.attributes import NO_SESSION
from jaxkv.scheduling.interface import Counts, Plan


class FairShare(NamedTuple):
    """Admits requests of the session with the fewest slots first.

    The slots of a session are those of its running sequences and of its earlier waiting
    requests, so that sessions take turns. A request without a session counts as a
    session of its own. All other decisions are those of `inner`.

    Source: max-min fairness as in Demers et al. 1989, counted in slots.
    """

    inner: first_come.FCFS

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        c = interface.skip_unmarked(counts)
        mine = jnp.asarray(interface.attributes_of(c.waiting_attributes).session)
        theirs = jnp.asarray(interface.attributes_of(c.attributes).session)
        is_named = (mine != NO_SESSION)[:, None]
        runs = is_named & (mine[:, None] == theirs[None, :]) & c.running[None, :]
        place = jnp.arange(mine.shape[0], dtype=jnp.int32)
        waits = is_named & (mine[:, None] == mine[None, :])
        waits &= (place[None, :] < place[:, None]) & c.waiting[None, :]
        slots = jnp.sum(runs, axis=1, dtype=jnp.int32)
        slots += jnp.sum(jnp.where(waits, c.waiting_slots[None, :], 0), axis=1)
        return interface.plan_by(self.inner, c, slots)


def fair_share(inner: first_come.FCFS | None = None) -> FairShare:
    """Makes a `FairShare` policy; `inner` None means `fcfs()`."""
    return FairShare(first_come.fcfs() if inner is None else inner)
