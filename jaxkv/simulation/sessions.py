"""Closed-loop sessions: requests that are sent when other requests are answered.

A request waits in a lane from the answer that releases it until it enters the queue.
Requests that can be released at the same time have different lanes, so a step takes
time that grows with the lanes and not with the requests.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.clock import MICROS_PER_SECOND, is_past
from jaxkv.ledger import NO_SEQUENCE, Ledger
from jaxkv.workloads import Dependencies, Workload

NEVER_S = 2**31 - 1
"""Arrival time, in seconds, of a request that has not been released."""


class SessionState(NamedTuple):
    """State of requests that are sent after others."""

    arrival: Int32[Array, "requests 2"]
    """Arrival time of each request in seconds and microseconds, `NEVER_S` seconds
    before it is known."""
    num_open: Int32[Array, " requests"]
    """Requests that must still be answered before each request is sent. Rejected
    requests are never released."""
    due: Int32[Array, "lanes 2"]
    """Arrival time of the request in each lane; `NEVER_S` seconds in an empty lane."""
    request: Int32[Array, " lanes"]
    """Request in each lane; arbitrary in an empty one."""
    num_roots: Int32[Array, ""]
    """Servable requests whose arrival times are given: the first ones of `order`."""
    num_roots_taken: Int32[Array, ""]
    """Requests among these that have entered the queue."""


class UpcomingRequest(NamedTuple):
    """The next of all requests that are released and have not entered the queue."""

    time: Int32[Array, " 2"]
    """Its arrival time; `NEVER_S` seconds if there is none."""
    request: Int32[Array, ""]
    is_root: Bool[Array, ""]
    """True if its arrival time was given."""


def reachable_requests(
    fits: Bool[Array, " requests"], after: Int32[Array, "requests width"]
) -> Bool[Array, " requests"]:
    """Marks the requests that fit, as do all requests that they wait for."""

    def narrow(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        fits, _ = carry
        before = arrays.take(fits.astype(jnp.int32), after, fill=1)
        narrowed = fits & jnp.all(before > 0, axis=1)
        return narrowed, jnp.any(narrowed != fits)

    return lax.while_loop(lambda carry: carry[1], narrow, (fits, jnp.ones((), bool)))[0]


def init_sessions(
    workload: Workload, is_served: Bool[Array, " requests"]
) -> SessionState | None:
    """Makes the state at time 0; None if no request is sent after others."""
    if (d := workload.dependencies) is None:
        return None
    is_root = d.lane < 0
    num_before = jnp.sum(d.after >= 0, axis=1, dtype=jnp.int32)
    return SessionState(
        arrival=workload.arrival,
        num_open=jnp.where(is_served, num_before, NEVER_S),
        due=jnp.full((d.lane_start.shape[0], 2), NEVER_S, jnp.int32),
        request=jnp.full(d.lane_start.shape, NO_SEQUENCE, jnp.int32),
        num_roots=jnp.sum(is_served & is_root, dtype=jnp.int32),
        num_roots_taken=jnp.zeros((), jnp.int32),
    )


def find_upcoming(
    sessions: SessionState, order: Int32[Array, " requests"]
) -> UpcomingRequest:
    """Returns the next request: the earliest, and of equal times the one listed first.

    `order` is that of `Simulation`.
    """
    s = sessions
    root = order[jnp.minimum(s.num_roots_taken, order.size - 1)]
    exists = s.num_roots_taken < s.num_roots
    root_time = jnp.where(exists, s.arrival[root], NEVER_S)
    # Lexicographic minimum by three reductions, which XLA vectorises.
    seconds = jnp.min(s.due[:, 0])
    is_first = s.due[:, 0] == seconds
    micros = jnp.min(jnp.where(is_first, s.due[:, 1], NEVER_S))
    is_first &= s.due[:, 1] == micros
    turn = jnp.min(jnp.where(is_first, s.request, NEVER_S))
    time = jnp.stack([seconds, micros])
    is_root = is_past(root_time, time)
    is_root &= (root < turn) | jnp.any(root_time != time)
    return UpcomingRequest(
        jnp.where(is_root, root_time, time), jnp.where(is_root, root, turn), is_root
    )


def enqueue_due(
    sessions: SessionState, books: Ledger, order: Int32[Array, " requests"], head: int
) -> tuple[SessionState, Ledger, UpcomingRequest]:
    """Moves requests that have arrived into the head of the queue, in order of arrival.

    Returns:
      The new states, and the next request that has not entered the queue.
    """
    place = jnp.arange(head, dtype=jnp.int32)

    # A loop, since few requests arrive in a step; its carry is small, because `vmap`
    # copies it in every pass.
    def goes_on(carry: tuple[Array, Array, Array, Array, UpcomingRequest]) -> Array:
        _, _, num_waiting, _, upcoming = carry
        return is_past(upcoming.time, books.clock) & (num_waiting < head)

    def enqueue(
        carry: tuple[Array, Array, Array, Array, UpcomingRequest],
    ) -> tuple[Array, Array, Array, Array, UpcomingRequest]:
        queue, due, num_waiting, num_roots_taken, upcoming = carry
        entered = ~upcoming.is_root & (sessions.request == upcoming.request)
        due = jnp.where(entered[:, None], NEVER_S, due)
        num_roots_taken += upcoming.is_root.astype(jnp.int32)
        left = sessions._replace(due=due, num_roots_taken=num_roots_taken)
        return (
            jnp.where(place == num_waiting, upcoming.request, queue),
            due,
            num_waiting + 1,
            num_roots_taken,
            find_upcoming(left, order),
        )

    queue, due, num_waiting, num_roots_taken, upcoming = lax.while_loop(
        goes_on,
        enqueue,
        (
            books.queue[:head],
            sessions.due,
            books.num_waiting,
            sessions.num_roots_taken,
            find_upcoming(sessions, order),
        ),
    )
    books = books._replace(
        queue=jnp.concatenate([queue, books.queue[head:]]), num_waiting=num_waiting
    )
    sessions = sessions._replace(due=due, num_roots_taken=num_roots_taken)
    return sessions, books, upcoming


def release_followers(
    sessions: SessionState,
    dependencies: Dependencies,
    answered: Int32[Array, " slots"],
    clock: Int32[Array, " 2"],
) -> SessionState:
    """Releases requests of which the last predecessor is answered at the clock.

    `answered` are the requests that are answered now, or `NO_SEQUENCE`.
    """
    s = sessions
    d = dependencies
    follower = arrays.take(d.followers, answered, fill=NO_SEQUENCE).reshape(-1)
    num_open = arrays.put(s.num_open, follower, NO_SEQUENCE, "add")
    is_released = arrays.take(num_open, follower, fill=NO_SEQUENCE) == 0
    follower = jnp.where(is_released, follower, NO_SEQUENCE)
    micros = arrays.take(d.delay, follower, fill=0) + clock[None]
    carried = micros[:, 1] // MICROS_PER_SECOND
    due = jnp.stack(
        [micros[:, 0] + carried, micros[:, 1] - carried * MICROS_PER_SECOND], axis=1
    )
    lane = arrays.take(d.lane, follower, fill=NO_SEQUENCE)
    return s._replace(
        arrival=arrays.put(s.arrival, follower, due),
        num_open=num_open,
        due=arrays.put(s.due, lane, due),
        request=arrays.put(s.request, lane, follower),
    )
