"""Timing: of single calls, of several systems in turns, and of an engine's calls."""

import concurrent.futures
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.progress import Progress
from jaxkv.serving.core import EngineCore


def time_call[**P, R](
    call: Callable[P, R], *args: P.args, **options: P.kwargs
) -> tuple[float, R]:
    """Returns the seconds that a call takes, and its result.

    Arrays among the arguments are waited for before, and those of the result after.
    """
    jax.block_until_ready((args, options))
    started = time.perf_counter()
    found = jax.block_until_ready(call(*args, **options))
    return time.perf_counter() - started, found


def median_seconds(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each, in turns; a first call of each is not counted."""
    times = [[time_call(call)[0] for call in calls] for _ in range(1 + rounds)]
    return np.median(times[1:], axis=0).tolist()


def measure_in_turns[C](
    cases: Iterable[C],
    num_rounds: int,
    begin: Callable[[C], list[Any]],
    measure: Callable[[C, Any], Any],
    *,
    progress: Progress,
    doing: str,
    what: str,
) -> Iterator[tuple[C, list[Any], dict[str, list[Any]]]]:
    """Measures everyone on case after case.

    Args:
      cases: what is measured.
      num_rounds: turns of each, at least 1.
      begin: prepares everyone for a case; they have names.
      measure: measures one of them on a case.
      progress: gets every turn; when it ends early, the case is left out.
      doing: what is done, in a word.
      what: a case is.

    Yields:
      The case, everyone, and their measurements by name.
    """
    turns = [(case, turn) for case in cases for turn in range(num_rounds + 1)]
    systems: list[Any] = []
    found: dict[str, list[Any]] = {}
    for case, turn in progress.track(turns, doing, "turns"):
        if turn == 0:
            progress.show(f"{what} {case}, warming up")
            systems = begin(case)
            found = {each.name: [] for each in systems}
            continue
        for each in systems:
            progress.show(f"{what} {case}, {each.name}")
            found[each.name].append(measure(case, each))
        if turn == num_rounds:
            yield case, systems, found


def median_and_spread(rates: Sequence[float]) -> tuple[float, float]:
    """The median of rates, and the share of it that they spread over."""
    rate = statistics.median(rates)
    return rate, (max(rates) - min(rates)) / rate


class CallTimes(NamedTuple):
    """When one call of K steps, and what followed it, was where; in seconds.

    Attributes:
      dispatched_s: when the host had handed it over.
      ready_s: when the device had its results.
      drained_s: when the device had handed out the sequences finished in it; equal
        to `ready_s` if there were none.
      has_rows: True if the call fed at least one token. A call that was dispatched
        before the host knew that all requests had finished feeds none.
    """

    dispatched_s: float
    ready_s: float
    drained_s: float
    has_rows: bool


@contextlib.contextmanager
def record_call_times(core: EngineCore) -> Generator[list[CallTimes]]:
    """Notes the times of the calls made inside; the list is whole at the end.

    A second thread waits for the results and does nothing else, so the engine's own
    order of work stays as it is.
    """
    times: list[CallTimes] = []

    def wait(call: Any, dispatched_s: float) -> None:
        jax.block_until_ready(call.info)
        ready_s = drained_s = time.perf_counter()
        if call.drained is not None:
            jax.block_until_ready(call.drained)
            drained_s = time.perf_counter()
        has_rows = bool(np.asarray(call.info.num_rows).any())
        times.append(CallTimes(dispatched_s, ready_s, drained_s, has_rows))

    with concurrent.futures.ThreadPoolExecutor(1) as waiting:
        core.on_dispatch = lambda call: waiting.submit(wait, call, time.perf_counter())
        try:
            yield times
        finally:
            core.on_dispatch = None


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
        if not call.has_rows:
            continue
        start_s = max(before.drained_s, call.dispatched_s)
        gaps += max(0.0, min(start_s, call.ready_s) - before.ready_s)
        spans += call.ready_s - before.ready_s
    return gaps / spans if spans else None
