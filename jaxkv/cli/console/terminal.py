"""Progress bars on standard error, and Ctrl-C during a run."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import FrameType, TracebackType

from rich import console as rich_console
from rich import live, progress, text

from jaxkv.cli.console import interrupts, printing
from jaxkv.cli.console.step_log import StepLog
from jaxkv.report import format_rate

REPORT_EVERY_S = 30.0
"""Seconds between two lines of a bar if there is no terminal."""
REPLY_TIMEOUT_S = 1.0
"""Seconds in which the main thread must react to a second Ctrl-C."""


class Terminal:
    """Progress bars on standard error, as a context.

    In the context, the first Ctrl-C sets `stopped`, and the second one interrupts at
    once; the same holds for all `interrupts.SIGNALS`. Signals that the process ignores
    since its start remain ignored. `stopped` is also set when it is read after
    `max_seconds`. On a terminal, a text below the bars is removed at the end; without a
    terminal, a bar prints a line at intervals.

    Args:
      last_words: returns the message after a second Ctrl-C if the main thread does not
        react because it is compiling; called from another thread, before the process
        ends.
      max_seconds: time limit from now on, above 0.
      log: receives the numbers of steps.

    Attributes:
      has_stopped: True if a reader of `stopped` was asked to stop.

    Raises:
      ValueError: `max_seconds` is not above 0.
    """

    def __init__(
        self,
        last_words: Callable[[], str] = lambda: "interrupted at once",
        max_seconds: float = math.inf,
        log: StepLog = lambda step, numbers: None,
    ) -> None:
        if not max_seconds > 0:
            raise ValueError(f"--max-seconds {max_seconds:g}: must be above 0")
        self.has_stopped = False
        self._log = log
        self._end_s = time.monotonic() + max_seconds
        self._last_words = last_words
        self._num_heard = self._num_handled = self._signal = 0
        self._is_left = threading.Event()
        self._console = printing.make_console(stderr=True)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(complete_style="blue", finished_style="blue"),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
        )
        self._live = live.Live(self._bars, console=self._console)
        self._exits = contextlib.ExitStack()

    @property
    def stopped(self) -> bool:
        """True if Ctrl-C was pressed or the time limit is reached."""
        if not self.has_stopped and time.monotonic() >= self._end_s:
            self.has_stopped = True
            self._console.print("time limit reached: stopping after the current piece")
        return self.has_stopped

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return self._end_s - time.monotonic()

    @property
    def status(self) -> int:
        """Exit status by the cause of a stop; 0 if the work was not stopped."""
        if self._signal:
            return interrupts.status_of(self._signal)
        return interrupts.RESUMABLE if self.has_stopped else 0

    @property
    def reason(self) -> str:
        """Cause of the stop as text."""
        is_limit = self.status == interrupts.RESUMABLE
        return "time limit reached" if is_limit else "interrupted"

    def __enter__(self) -> "Terminal":
        """Starts the display and handles Ctrl-C."""
        self._exits.enter_context(interrupts.handle_signals(self._handle, self._hear))
        if self._console.is_terminal:
            self._exits.enter_context(self._live)
            self._exits.callback(self.show, "")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Freezes the bars and restores the signal handlers."""
        self._is_left.set()
        self._exits.close()

    def log(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Records the numbers of a step."""
        self._log(step, numbers)

    def bar(
        self, label: str, total: float | None, unit: str
    ) -> Callable[[float], None]:
        """Opens a bar with rate and remaining time."""
        task = self._bars.add_task(label, total=total, rate="")
        started_s = reported_s = time.monotonic()

        def update(done: float) -> None:
            nonlocal reported_s
            speed = self._bars.tasks[task].speed
            # The recent speed, which is not meaningful for a completed bar.
            is_shown = speed and done != total
            rate = f"{format_rate(speed)} {unit}/s" if is_shown else ""
            self._bars.update(task, completed=done, rate=rate)
            now_s = time.monotonic()
            is_time = done == total or now_s - reported_s > REPORT_EVERY_S
            if is_time and not self._console.is_terminal:
                reported_s = now_s
                of = f" of {total:,.0f}" if total is not None else ""
                spent = f"{now_s - started_s:,.1f} s"
                self._console.print(f"{label}: {done:,.0f}{of} {unit}, {spent}")

        return update

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        """Yields the items under a bar, until they end or the work is stopped."""
        update = self.bar(label, len(items) if isinstance(items, Sized) else None, unit)
        for done, item in enumerate(items, 1):
            if self.stopped:
                return
            yield item
            update(done)

    def show(self, content: str) -> None:
        """Replaces the text under the bars."""
        below = text.Text(content, "dim", no_wrap=True, overflow="crop")
        shown = [self._bars, below] if content else [self._bars]
        self._live.update(rich_console.Group(*shown))

    def _hear(self, number: int) -> None:
        """Called at once after Ctrl-C, in a separate thread."""
        self._signal = number
        self._num_heard += 1
        self.has_stopped = True
        if self._num_heard == 1:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            again = f"stopping after the current piece; {name} again stops at once"
            self._console.print(again)
        elif not self._is_left.wait(REPLY_TIMEOUT_S):
            self._live.stop()
            interrupts.exit_now(self._last_words(), self.status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Called in the main thread; several signals may be merged into one call."""
        self._signal = number
        self._num_handled += 1
        self.has_stopped = True
        if max(self._num_heard, self._num_handled) > 1:
            self._is_left.set()
            raise interrupts.WorkStopped(status=self.status)
