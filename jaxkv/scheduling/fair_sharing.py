"""Fair share: requests of sessions with fewer running sequences are admitted first."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.attributes import NO_SESSION
from jaxkv.scheduling.interface import Counts, OrderedQueue, Policy


class FairShare(NamedTuple):
    """Requests of the session with the fewest slots first.

    The slots of a session are those of its running sequences and of its earlier waiting
    requests, so that sessions take turns. A request without a session counts as a
    session of its own.

    Source: max-min fairness as in Demers et al. 1989, counted in slots.
    """

    overtaking_s = math.inf

    def __call__(self, counts: Counts) -> Int32[Array, " head"]:
        """Returns the slots of each request's session."""
        c = counts
        session = interface.attributes_of(c.waiting_attributes).session
        session = jnp.broadcast_to(jnp.asarray(session, jnp.int32), c.waiting.shape)
        running = interface.attributes_of(c.attributes).session
        running = jnp.broadcast_to(jnp.asarray(running, jnp.int32), c.running.shape)
        is_named = (session != NO_SESSION)[:, None]
        runs = is_named & (session[:, None] == running[None, :]) & c.running[None, :]
        place = jnp.arange(session.shape[0], dtype=jnp.int32)
        waits = is_named & (session[:, None] == session[None, :])
        waits &= (place[None, :] < place[:, None]) & c.waiting[None, :]
        slots = jnp.sum(runs, axis=1, dtype=jnp.int32)
        slots += jnp.sum(jnp.where(waits, c.waiting_slots[None, :], 0), axis=1)
        return slots


def fair_share(inner: Policy | None = None) -> OrderedQueue:
    """Makes a policy with the order of `FairShare`; `inner` None means `fcfs()`.

    Raises:
      ValueError: `inner` is not a policy.
    """
    return first_come.order_queue(FairShare(), inner)
