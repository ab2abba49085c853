"""Timing of single calls, of several systems in rotation, and of an engine's calls."""

import concurrent.futures
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxkv.progress import Progress
from jaxkv.serving import Engine


def time_call[**P, R](
    call: Callable[P, R], *args: P.args, **options: P.kwargs
) -> tuple[float, R]:
    """Returns the seconds of a call, and its result.

    Waits for arrays among the arguments before the call, and for the result after it.
    """
    jax.block_until_ready((args, options))
    started = time.perf_counter()
    answer = jax.block_until_ready(call(*args, **options))
    return time.perf_counter() - started, answer


def median_seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Returns the median seconds of each call, measured in rotation after a warm-up."""
    times = [[time_call(call)[0] for call in calls] for _ in range(1 + rounds)]
    return np.median(times[1:], axis=0).tolist()


class NamedSystem(Protocol):
    """A system that is measured; its name is the key of its measurements."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...


def measure_in_turns[C, S: NamedSystem, M](
    cases: Iterable[C],
    num_rounds: int,
    begin: Callable[[C], list[S]],
    measure: Callable[[C, S], M],
    *,
    progress: Progress,
    bar_label: str,
    case_name: str,
) -> Iterator[tuple[C, list[S], dict[str, list[M]]]]:
    """Measures all systems on one case after another, in rotation.

    Args:
      cases: cases to measure.
      num_rounds: rounds per case, at least 1.
      begin: prepares all systems for a case; each has a `name`.
      measure: measures one system on a case.
      progress: progress bar; if it stops early, the current case is left out.
      bar_label: label of the progress bar.
      case_name: noun for a case.

    Yields:
      The case, the systems, and their measurements by name.
    """
    turns = [(case, turn) for case in cases for turn in range(num_rounds + 1)]
    systems: list[S] = []
    runs_by_name: dict[str, list[M]] = {}
    for case, turn in progress.track(turns, bar_label, "turns"):
        if turn == 0:
            progress.show(f"{case_name} {case}, warming up")
            systems = begin(case)
            runs_by_name = {system.name: [] for system in systems}
            continue
        for system in systems:
            progress.show(f"{case_name} {case}, {system.name}")
            runs_by_name[system.name].append(measure(case, system))
        if turn == num_rounds:
            yield case, systems, runs_by_name


def median_and_spread(rates: Sequence[float]) -> tuple[float, float]:
    """Returns the median of rates, and their range relative to it."""
    rate = statistics.median(rates)
    return rate, (max(rates) - min(rates)) / rate


class CallTimes(NamedTuple):
    """Times of one call of K steps, in seconds.

    Attributes:
      dispatched_s: time at which the host had dispatched the call.
      ready_s: time at which its results were ready on the device.
      drained_s: time at which its finished sequences were drained; equal to `ready_s`
        without any.
      has_rows: True if the call fed at least one token. A call that was dispatched
        before the host knew that all requests had finished feeds none.
    """

    dispatched_s: float
    ready_s: float
    drained_s: float
    has_rows: bool


@contextlib.contextmanager
def record_call_times(engine: Engine) -> Generator[list[CallTimes]]:
    """Records the times of the calls in its context; complete at the end of it.

    A second thread waits for the results, so the engine's own order of work does not
    change.
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
        engine.on_dispatch = lambda call: waiting.submit(
            wait, call, time.perf_counter()
        )
        try:
            yield times
        finally:
            engine.on_dispatch = None


def host_share(calls: list[CallTimes]) -> float | None:
    """Returns the share of time in which the device had no steps to run.

    Between two calls the device drains finished sequences, or waits for the host. Each
    gap counts in full, divided by the time from one call's end to the end of the next.

    Args:
      calls: calls in order. Time before the first call, and before calls without
        tokens, is not counted.

    Returns:
      Share in [0, 1]; None for fewer than two calls.
    """
    gaps = spans = 0.0
    for before, call in itertools.pairwise(calls):
        if not call.has_rows:
            continue
        start_s = max(before.drained_s, call.dispatched_s)
        gaps += max(0.0, min(start_s, call.ready_s) - before.ready_s)
        spans += call.ready_s - before.ready_s
    return gaps / spans if spans else None
