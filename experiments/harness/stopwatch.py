"""Seconds of calls on a device, waited for."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds of a call whose arguments are there before, and what it gives."""
    jax.block_until_ready(args)
    started = time.perf_counter()
    found = jax.block_until_ready(call(*args))
    return time.perf_counter() - started, found


def medians(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each, in turns; a first call of each is not counted."""
    taken = [[timed(call)[0] for call in calls] for _ in range(1 + rounds)]
    return np.median(taken[1:], axis=0).tolist()
