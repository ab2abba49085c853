"""Time as the engine and the simulation count it: seconds and microseconds, two int32.

One int32 of microseconds is full after 36 minutes, and a float32 clock is good to a
tenth of a millisecond after a quarter of an hour; this one is exact for 68 years.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Num

SECOND = 1_000_000
"""Microseconds."""


def advance(
    clock: Int32[Array, " 2"], seconds: Float[Array, ""]
) -> tuple[Int32[Array, " 2"], Int32[Array, ""]]:
    """Lets time pass.

    Args:
      clock: seconds and microseconds.
      seconds: how long, in [0, 2000); rounded to microseconds.

    Returns:
      The new clock, and the microseconds that passed.
    """
    whole = jnp.floor(seconds)
    # Apart, since a float32 of microseconds is exact for 16 seconds only.
    part = jnp.round((seconds - whole) * SECOND).astype(jnp.int32)
    full, total = whole.astype(jnp.int32), clock[1] + part
    clock = jnp.stack([clock[0] + full + total // SECOND, total % SECOND])
    return clock, full * SECOND + part


def is_past(
    time: Int32[Array, "*shape 2"], clock: Int32[Array, "*#shape 2"]
) -> Bool[Array, "*shape"]:
    """Says which times the clock has reached: one clock, or one for each time."""
    seconds, micros = time[..., 0], time[..., 1]
    now_s, now_us = clock[..., 0], clock[..., 1]
    return (seconds < now_s) | ((seconds == now_s) & (micros <= now_us))


def later(first: Int32[Array, " 2"], second: Int32[Array, " 2"]) -> Int32[Array, " 2"]:
    """The later of two times."""
    return jnp.where(is_past(second, first), first, second)


def from_seconds(
    seconds: int | float | Num[np.ndarray, "*shape"],
) -> Int32[np.ndarray, "*shape 2"]:
    """Rounds seconds in float64 to the nearest microsecond, on the host."""
    micros = np.round(np.asarray(seconds, np.float64) * SECOND).astype(np.int64)
    return np.stack([micros // SECOND, micros % SECOND], axis=-1).astype(np.int32)


def to_seconds(time: Num[np.ndarray, "*shape 2"]) -> Float[np.ndarray, "*shape"]:
    """Seconds in float64, on the host."""
    time = np.asarray(time).astype(np.float64)
    return time[..., 0] + time[..., 1] / SECOND
