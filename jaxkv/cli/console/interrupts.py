"""Ctrl-C while the main thread is blocked: compilation, imports, garbage collection.

Python runs a signal handler between two bytecode instructions of the main thread. A
compilation is one such instruction of many seconds; and the `KeyboardInterrupt` of a
handler can be lost or logged at length inside a library that imports or cleans up.
Therefore a separate thread listens for signals. SIGTERM, which a cluster sends before
it takes a machine away, and SIGHUP, which a closing terminal sends, are treated like
Ctrl-C.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request an end."""
STATUS = 130
"""Exit status after Ctrl-C, see `status_of`."""
RESUMABLE = 75
"""Exit status if the time limit was reached and the same command continues the work:
EX_TEMPFAIL, a temporary failure."""


class WorkStopped(KeyboardInterrupt):
    """Work was stopped before it had a result.

    Args:
      line: message about the current state.
      status: exit status, as `status_of` returns it for a signal, or `RESUMABLE`.
    """

    def __init__(self, line: str = "", status: int = STATUS):
        super().__init__(line)
        self.status = status


def status_of(number: int) -> int:
    """Returns the exit status after a signal, by the convention of shells."""
    return 128 + number


@contextlib.contextmanager
def handle_signals(
    handle: Callable[[int, FrameType | None], object], hear: Callable[[int], object]
) -> Generator[None]:
    """Handles Ctrl-C and related signals; contexts can be nested.

    Has no effect outside the main thread, where signals do not arrive, or for a signal
    that the process ignores since its start.

    Args:
      handle: signal handler; runs in the main thread as soon as Python can run it.
      hear: called with the signal number for every signal, immediately, in a separate
        thread.
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
    # The system writes to the socket on a signal, before Python runs its handler.
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
    """Makes Ctrl-C end the process at once: one line, status 130.

    For work without intermediate results.
    """
    return handle_signals(
        lambda number, frame: None, lambda number: exit_now(status=status_of(number))
    )


def raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    """Raises `WorkStopped`: a handler for work that keeps partial results."""
    raise WorkStopped(status=status_of(number))


def exit_now(line: str = "interrupted", status: int = STATUS) -> NoReturn:
    """Ends the process from any thread."""
    with contextlib.suppress(OSError, AttributeError):  # standard error is closed
        print("jaxkv:", line, file=sys.stderr, flush=True)
    os._exit(status)
