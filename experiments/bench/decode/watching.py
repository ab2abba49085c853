"""An engine seen from outside: how long the device waits for the host, peak memory."""

import contextlib
import itertools
import queue
import resource
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.serving import engine


class CallTimes(NamedTuple):
    """When one call of K steps, and what followed it, was where; in seconds.

    Attributes:
      dispatched_s: when the host had handed it over.
      ready_s: when the device had its results.
      drained_s: when the device had handed out the finished sequences behind it; equal
        to `ready_s` if there were none.
      fed: whether it fed any tokens; one that was handed over before the host knew that
        all is done does not.
    """

    dispatched_s: float
    ready_s: float
    drained_s: float
    fed: bool


class WatchedEngine(engine.Engine):
    """An `Engine` that can note when each call is dispatched, and when it is ready."""

    _dispatched: queue.SimpleQueue[Any] | None = None

    @contextlib.contextmanager
    def watch(self) -> Generator[list[CallTimes]]:
        """Notes the times of the calls made inside; the list is whole at the end.

        A second thread waits for the results and does nothing else, so the engine's own
        order of work stays as it is.
        """
        times: list[CallTimes] = []
        self._dispatched = queue.SimpleQueue()
        thread = threading.Thread(target=_watch, args=(self._dispatched, times))
        thread.start()
        try:
            yield times
        finally:
            self._dispatched.put(None)
            thread.join()
            self._dispatched = None

    def _dispatch(self) -> None:
        num_unread = len(self._unread)
        super()._dispatch()
        if self._dispatched is not None and len(self._unread) > num_unread:
            self._dispatched.put((time.perf_counter(), self._unread[-1]))


def _watch(dispatched: queue.SimpleQueue[Any], times: list[CallTimes]) -> None:
    while (item := dispatched.get()) is not None:
        dispatched_s, call = item
        jax.block_until_ready(call.info)
        ready_s = drained_s = time.perf_counter()
        if call.drained is not None:
            jax.block_until_ready(call.drained)
            drained_s = time.perf_counter()
        fed = bool(np.asarray(call.info.num_rows).any())
        times.append(CallTimes(dispatched_s, ready_s, drained_s, fed))


def host_share(calls: list[CallTimes]) -> float | None:
    """The share of time in which the device had no steps to run.

    Between the end of one call and the start of the next the device hands out finished
    sequences, or waits for the host. That gap counts in full, over the time from one
    call's end to the next one's.

    Args:
      calls: in order. What goes before the first, and before those that feed nothing,
        is left out.

    Returns:
      A share in [0, 1]; `None` with less than two calls.
    """
    gaps = spans = 0.0
    for before, call in itertools.pairwise(calls):
        if not call.fed:
            continue
        start_s = max(before.drained_s, call.dispatched_s)
        gaps += max(0.0, min(start_s, call.ready_s) - before.ready_s)
        spans += call.ready_s - before.ready_s
    return gaps / spans if spans else None


def reset_peak() -> None:
    """Lets `peak_bytes` forget the past, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """Peak memory: the first device's if it keeps count, else this process's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
