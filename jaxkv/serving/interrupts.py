"""Signals that wait while a value is between two owners.

Python runs the handler of a signal between two steps of the main thread's program, and
most handlers raise: Ctrl-C a `KeyboardInterrupt`, an alarm what its owner likes.
Between a call that consumes its arguments and the line that stores what it returned,
that loses both.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_NUMBERS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
"""Signals that programs hear; Ctrl-C is the first."""


class defer_signals:
    """A context in which no handler of a signal runs; each runs once at its end.

    For short stretches: who presses Ctrl-C waits for the end. Signals that no Python
    function handles (ignored ones, and those that end the process) are left as they
    are, and so is all in other threads than the main one, where no handler runs.
    Contexts may be nested; handlers run at the end of the outermost.
    """

    def __init__(self) -> None:
        """Defers nothing yet."""
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: dict[int, FrameType | None] = {}
        self._holds = True

    def __enter__(self) -> None:
        """From here on signals wait."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of a handler that still stood
            self._restore()
            raise

    def __exit__(self, *error: object) -> None:
        """Runs the handlers of signals that came."""
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._came[number] = frame
        else:  # left standing, because a handler raised while others were restored
            self._before[number](number, frame)

    def _restore(self) -> None:
        try:
            # Ctrl-C last: nothing is left to be restored when it can raise again.
            for number in reversed(self._before):
                signal.signal(number, self._before[number])
        finally:
            self._holds = False
            self._deliver()

    def _deliver(self) -> None:
        """Runs the handlers of what came, the others too if one raises."""
        if self._came:
            number, frame = self._came.popitem()
            try:
                self._before[number](number, frame)
            finally:
                self._deliver()
