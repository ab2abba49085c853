"""Ctrl-C at any moment of an engine: the call ends, and the engine continues."""

import dataclasses
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.serving import interrupts
from tests.support import engines
from tests.support.folders import TOKENIZED

BOUNDS = dataclasses.replace(
    engines.SERVED, prefix_cache=True, max_beams=3, max_swap_pages=20
)
KNOWN = ([5, 6, 7], [8, 9])
ASK = Sampling.greedy(max_tokens=9)
ASKED = ([10, 11, 12, 13], [14])
LONG = Sampling.greedy(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> jaxkv.Engine:
    policy = jaxkv.fcfs(preemption="swap")
    return jaxkv.Engine.load(TOKENIZED, policy=policy, keep_trace=True, **vars(BOUNDS))


@pytest.fixture(scope="module")
def expected(engine: jaxkv.Engine) -> dict[tuple[int, ...], list[int]]:
    """Answers of an engine without interrupts, by prompt."""
    prompts = (*KNOWN, *ASKED)
    asks = [ASK] * 2 + [LONG] * 2
    done = engine.generate(prompts, asks)
    return {
        tuple(p): completion.tokens for p, completion in zip(prompts, done, strict=True)
    }


@pytest.fixture(autouse=True)
def _python_handles_it() -> Iterator[None]:
    """A shell ignores Ctrl-C for background processes."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are heard in the main thread only")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


PHASES = {
    "submit": ("submit", "_make_record", "_add", "generate", "_assign_id", "_validate"),
    "compile": ("compile", "compile_steps", "_compile_steps", "_compile_drain"),
    "call": ("step", "dispatch", "next_batch", "mark_submitted", "make_requests"),
    "read": ("read", "extend", "_emit", "group_emitted", "stream", "_lost_on_error"),
    "drain": ("next_cancels", "mark_drained", "collect", "_close", "close", "complete"),
    "copy": ("exchange", "empty_transfer"),
    "defer": ("__enter__", "__exit__", "_note", "_restore", "_deliver"),
}
"""Functions whose lines belong to each phase."""
FILES = (
    "engine",
    "core",
    "request_batch",
    "request_tracker",
    "requests",
    "outputs",
    "host_swap",
    "interrupts",
    "engine_programs",
)


class Interrupter:
    """Sends a signal before the n-th line executed in some functions."""

    def __init__(self, names: tuple[str, ...], at: int, number: int = signal.SIGINT):
        self.names = names
        self.at = at
        self.number = number
        self.num_lines = 0

    def __enter__(self) -> "Interrupter":
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        code = frame.f_code
        ours = path.stem in FILES and path.parent.name in ("serving", "compiling")
        return self._line if ours and code.co_name in self.names else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                signal.raise_signal(self.number)
        return self._line


def work(engine: jaxkv.Engine, received: dict[int, list[int]]) -> None:
    """Submits requests in both ways; `received` collects the tokens of events by
    request.
    """
    # So that programs are requested again.
    engine._programs._steps.clear()
    engine._programs._others.clear()
    received[engine.submit(ASKED[0], LONG, request_id=1000)] = []
    engine.generate(KNOWN, ASK)
    received[engine.submit(ASKED[1], LONG, request_id=1001)] = []
    listen(engine, received)


def listen(engine: jaxkv.Engine, received: dict[int, list[int]]) -> None:
    for event in engine.stream():
        received.setdefault(event.request_id, []).extend(event.tokens)
        if event.completion is not None:
            assert event.completion.tokens == received[event.request_id]


def check(engine: jaxkv.Engine, received: dict[int, list[int]], expected: dict) -> None:
    """Checks that the engine answers a known batch correctly, and is idle after it."""
    done = engine.generate(KNOWN, ASK)
    assert [completion.tokens for completion in done] == [
        expected[tuple(p)] for p in KNOWN
    ]
    assert {completion.reason for completion in done} <= {"length", "stop"}
    listen(engine, received)
    # Every submitted request is delivered completely, once, despite interrupts.
    for name, tokens in received.items():
        assert tokens == expected[tuple(ASKED[name - 1000])]
    received.clear()
    engines.assert_empty(engine.state)
    assert not np.asarray(engine.state.ledger.progress).any()
    assert engine.tracker.is_empty()
    assert engine.tracker._requests == 0
    assert not engine.unread
    assert engine._host.num_used == 0
    engine.trace.clear()


def swaps(engine: jaxkv.Engine, received: dict[int, list[int]]) -> None:
    """Makes pages move to the host and back."""
    engine._host._is_compiled = False
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    engine.generate(prompts, Sampling(max_tokens=55, ignore_eos=True))


def interrupt(
    engine: jaxkv.Engine, phase: str, times: int, expected: dict, work: Callable = work
) -> int:
    """Interrupts the work repeatedly, at places spread over a phase."""
    received: dict[int, list[int]] = {}
    # Programs may have been dropped; traced line by line they compile in a minute.
    work(engine, received)
    check(engine, received, expected)
    with Interrupter(PHASES[phase], 0) as interrupter:
        work(engine, received)
    check(engine, received, expected)
    num_interrupted = 0
    places = np.linspace(
        1, interrupter.num_lines, min(times, interrupter.num_lines), dtype=int
    )
    for place in places.tolist():
        try:
            with Interrupter(PHASES[phase], place):
                work(engine, received)
        except KeyboardInterrupt:
            num_interrupted += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        check(engine, received, expected)
    return num_interrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(name, marks=[] if name in ("call", "read") else pytest.mark.slow)
        for name in PHASES
        if name != "copy"
    ],
)
@pytest.mark.parametrize(
    ("places", "min_interrupts"),
    [(10, 8), pytest.param(60, 20, marks=pytest.mark.slow)],
)
def test_an_interrupted_engine_continues(
    engine: jaxkv.Engine, expected: dict, phase: str, places: int, min_interrupts: int
) -> None:
    assert interrupt(engine, phase, places, expected) >= min_interrupts


@pytest.mark.slow
def test_an_engine_interrupted_during_host_swap_continues(
    engine: jaxkv.Engine, expected: dict
) -> None:
    assert interrupt(engine, "copy", 24, expected, swaps) >= 20


@pytest.mark.slow
def test_ctrl_c_at_any_time(engine: jaxkv.Engine, expected: dict) -> None:
    # Real signals at random times, about half of them inside JAX.
    rng = np.random.default_rng(0)
    received = {}
    num_interrupted = 0
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(60):
        press = functools.partial(signal.pthread_kill, main, signal.SIGINT)
        timer = threading.Timer(rng.uniform(0, 0.25), press)
        try:
            timer.start()
            work(engine, received)
            timer.join()
        except KeyboardInterrupt:
            num_interrupted += 1
        timer.join()
        check(engine, received, expected)
    assert num_interrupted > 20


@pytest.mark.slow
def test_other_signals_wait_too(engine: jaxkv.Engine, expected: dict) -> None:
    # A time limit, as many programs set one.
    def raise_timeout(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("too slow")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    received: dict[int, list[int]] = {}
    try:
        for place in (3, 30, 90):
            with (
                pytest.raises(TimeoutError, match="too slow"),
                Interrupter(PHASES["call"], place, signal.SIGALRM),
            ):
                work(engine, received)
            check(engine, received, expected)
        assert signal.getsignal(signal.SIGALRM) is raise_timeout
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signal_waits_for_the_end_of_the_outermost_context() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with interrupts.defer_signals():
        signal.raise_signal(signal.SIGINT)
        with interrupts.defer_signals():
            signal.raise_signal(signal.SIGINT)
        assert heard == []
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_process_that_ignores_ctrl_c_continues_to() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.defer_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_every_handler_runs_although_one_raises() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.defer_signals():
            list(map(signal.raise_signal, (signal.SIGALRM, signal.SIGINT)))
        assert heard == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
