"""Time of the engine and the simulator: seconds and microseconds, two int32.

One int32 of microseconds overflows after 36 minutes, and a float32 clock is accurate to
0.1 ms after a quarter of an hour; this clock is exact for 68 years.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Num

MICROS_PER_SECOND = 1_000_000
"""Microseconds in a second."""


def advance(
    clock: Int32[Array, " 2"], seconds: Float[Array, ""]
) -> tuple[Int32[Array, " 2"], Int32[Array, ""]]:
    """Adds seconds to the clock.

    Args:
      clock: seconds and microseconds.
      seconds: duration in [0, 2000) s, rounded to microseconds.

    Returns:
      The new clock, and the duration in microseconds.
    """
    whole_seconds = jnp.floor(seconds)
    # Only the fraction is rounded: a float32 of microseconds is exact up to 16 s.
    part = jnp.round((seconds - whole_seconds) * MICROS_PER_SECOND).astype(jnp.int32)
    full = whole_seconds.astype(jnp.int32)
    total = clock[1] + part
    clock = jnp.stack(
        [clock[0] + full + total // MICROS_PER_SECOND, total % MICROS_PER_SECOND]
    )
    return clock, full * MICROS_PER_SECOND + part


def is_past(
    time: Int32[Array, "*shape 2"], clock: Int32[Array, "*#shape 2"]
) -> Bool[Array, "*shape"]:
    """Returns True where the clock has reached the time.

    `clock` is one clock, or one for each time.
    """
    seconds = time[..., 0]
    micros = time[..., 1]
    now_s = clock[..., 0]
    now_us = clock[..., 1]
    return (seconds < now_s) | ((seconds == now_s) & (micros <= now_us))


def latest(first: Int32[Array, " 2"], second: Int32[Array, " 2"]) -> Int32[Array, " 2"]:
    """Returns the later of two times."""
    return jnp.where(is_past(second, first), first, second)


def from_seconds(
    seconds: int | float | Num[np.ndarray, "*shape"],
) -> Int32[np.ndarray, "*shape 2"]:
    """Rounds seconds in float64 to the nearest microsecond, on the host."""
    micros = np.round(np.asarray(seconds, np.float64) * MICROS_PER_SECOND).astype(
        np.int64
    )
    return np.stack(
        [micros // MICROS_PER_SECOND, micros % MICROS_PER_SECOND], axis=-1
    ).astype(np.int32)


def to_seconds(time: Num[np.ndarray, "*shape 2"]) -> Float[np.ndarray, "*shape"]:
    """Converts times to seconds in float64, on the host."""
    time = np.asarray(time).astype(np.float64)
    return time[..., 0] + time[..., 1] / MICROS_PER_SECOND
