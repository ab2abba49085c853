"""Defers signals while a value is between two owners.

Python runs signal handlers between two bytecodes of the main thread, and most handlers
raise: Ctrl-C a `KeyboardInterrupt`, an alarm the exception of its owner. Raised between
a call that consumes its arguments and the assignment of its result, that loses both.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNAL_NUMBERS = [
    getattr(signal, name) for name in _SIGNAL_NAMES if hasattr(signal, name)
]
"""Signals that are deferred; Ctrl-C is the first."""


class defer_signals:
    """A context that defers signal handlers; each runs once at its end.

    For short blocks: Ctrl-C waits for the end. Signals without a Python handler
    (ignored ones, and those that end the process) are unaffected, as are threads other
    than the main one, where no handler runs. Contexts may be nested; handlers run at
    the end of the outermost.
    """

    def __init__(self) -> None:
        """Initialises the context; signals are deferred from `__enter__` on."""
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: dict[int, FrameType | None] = {}
        self._holds = True

    def __enter__(self) -> None:
        """Starts to defer signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNAL_NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of a handler that was not replaced yet
            self._restore()
            raise

    def __exit__(self, *error: object) -> None:
        """Runs the handlers of deferred signals."""
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._came[number] = frame
        else:  # not restored, because another handler raised
            self._before[number](number, frame)

    def _restore(self) -> None:
        try:
            # Ctrl-C last: all other handlers are restored when it can raise again.
            for number in reversed(self._before):
                signal.signal(number, self._before[number])
        finally:
            self._holds = False
            self._deliver()

    def _deliver(self) -> None:
        """Runs the handlers of deferred signals, all of them even if one raises."""
        if self._came:
            number, frame = self._came.popitem()
            try:
                self._before[number](number, frame)
            finally:
                self._deliver()
