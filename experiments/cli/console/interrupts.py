"""Ctrl-C while somebody else has the main thread: a compiler, an import, a collector.

Python runs a signal's handler between two steps of the main thread's program. Compiling
is one step of many seconds; and the `KeyboardInterrupt` that a handler raises can be
lost or told at length, if it meets a library that imports or cleans up. So a thread of
its own listens. What a cluster sends before it takes a machine away, and what a
terminal sends when it is closed, are heard like Ctrl-C.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that ask for an end."""
STATUS = 130
"""Exit status after Ctrl-C, see `status_of`."""
RESUMABLE = 75
"""Exit status where the time was up and the same command goes on: the system's word
for a failure that passes, EX_TEMPFAIL."""


class WorkStopped(KeyboardInterrupt):
    """Work was stopped before it had a result.

    Args:
      line: what there is now.
      status: the exit status, as `status_of` has it for a signal, or `AGAIN`.
    """

    def __init__(self, line: str = "", status: int = STATUS):
        super().__init__(line)
        self.status = status


def status_of(number: int) -> int:
    """The exit status after a signal, as shells have it."""
    return 128 + number


@contextlib.contextmanager
def handle_signals(
    handle: Callable[[int, FrameType | None], Any], hear: Callable[[int], Any]
) -> Generator[None]:
    """Takes over Ctrl-C and its like, inside another such context too.

    Where signals do not arrive, in other threads than the main one, nothing changes;
    nor for a signal that the process was started to ignore.

    Args:
      handle: the signals' handler; runs in the main thread when Python has its turn.
      hear: runs for every one, in the moment, in a thread of its own; is given the
        signal's number.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handled = [x for x in SIGNALS if signal.getsignal(x) is not signal.SIG_IGN]
    if not is_main or not handled:
        yield
        return
    receiver, signals = socket.socketpair()
    signals.setblocking(False)

    def listen() -> None:
        while number := receiver.recv(1):
            if number[0] in handled:
                hear(number[0])

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    # The system writes to it when the signal comes, before Python has its turn.
    wakeup_before = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    handlers_before = [(number, signal.signal(number, handle)) for number in handled]
    try:
        yield
    finally:
        for number, handler in handlers_before:
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        signals.close()
        thread.join()
        receiver.close()


def exit_on_interrupt() -> contextlib.AbstractContextManager[None]:
    """Lets Ctrl-C end the process: one line, status 130, nothing else said or done.

    For work of which there is nothing to keep.
    """
    return handle_signals(
        lambda number, frame: None, lambda number: exit_now(status=status_of(number))
    )


def raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    """Raises `Stopped`: a handler for work that keeps what it has."""
    raise WorkStopped(status=status_of(number))


def exit_now(line: str = "interrupted", status: int = STATUS) -> NoReturn:
    """Ends the process from any thread."""
    with contextlib.suppress(OSError, AttributeError):  # nobody is there to read it
        print("jaxkv:", line, file=sys.stderr, flush=True)
    os._exit(status)
