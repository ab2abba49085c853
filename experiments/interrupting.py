"""Ctrl-C while somebody else has the main thread: a compiler, an import, a collector.

Python runs a signal's handler between two steps of the main thread's program. Compiling
is one step of many seconds; and the `KeyboardInterrupt` that a handler raises can be
lost or told at length, if it meets a library that imports or cleans up. So a thread of
its own listens.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

AGAIN = 75
"""Exit status where the time was up and the same command goes on: the system's word
for a failure that passes, EX_TEMPFAIL."""


class TimeIsUp(KeyboardInterrupt):
    """Work was stopped by the clock before it had a result, and can go on."""


@contextlib.contextmanager
def handling(
    handle: Callable[[int, FrameType | None], Any], hear: Callable[[], Any]
) -> Generator[None]:
    """Takes over Ctrl-C, inside another such context too.

    Where signals do not arrive, in other threads than the main one, and in a process
    that was started to ignore Ctrl-C, nothing changes.

    Args:
      handle: the signal's handler; runs in the main thread when Python has its turn.
      hear: runs for every Ctrl-C, in the moment, in a thread of its own.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    ours, signals = socket.socketpair()
    signals.setblocking(False)

    def listen() -> None:
        while number := ours.recv(1):
            if number[0] == signal.SIGINT:
                hear()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    # The system writes to it when the signal comes, before Python has its turn.
    wakeup_before = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    handler_before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler_before)
        signal.set_wakeup_fd(wakeup_before)
        signals.close()
        thread.join()
        ours.close()


def leaving_at_once() -> contextlib.AbstractContextManager[None]:
    """Lets Ctrl-C end the process: one line, status 130, nothing else said or done.

    For work of which there is nothing to keep.
    """
    return handling(lambda number, frame: None, leave)


def leave(line: str = "interrupted") -> None:
    """Ends the process from any thread."""
    print("jaxkv:", line, file=sys.stderr, flush=True)
    os._exit(130)
