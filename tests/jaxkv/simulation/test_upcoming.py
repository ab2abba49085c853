"""The next request of sessions, and none after the last."""

import jax.numpy as jnp

from jaxkv.simulation import sessions


def test_nothing_is_upcoming_after_the_last_request() -> None:
    state = sessions.SessionState(
        arrival=jnp.asarray([[3, 0], [5, 0]], jnp.int32),
        num_open=jnp.zeros(2, jnp.int32),
        due=jnp.full((2, 2), sessions.NEVER_S, jnp.int32),
        request=jnp.zeros(2, jnp.int32),
        num_roots=jnp.int32(2),
        num_roots_taken=jnp.int32(1),
    )
    order = jnp.asarray([0, 1], jnp.int32)
    upcoming = sessions.find_upcoming(state, order)
    assert (upcoming.request, upcoming.time.tolist()) == (1, [5, 0])
    state = state._replace(num_roots_taken=jnp.int32(2))
    assert sessions.find_upcoming(state, order).time[0] == sessions.NEVER_S
