"""Progress on standard error, and Ctrl-C while something runs."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import FrameType, TracebackType
from typing import Self

from rich import console as rich_console
from rich import live, progress, text

from experiments.cli.console import interrupts, printing
from experiments.framework import units

REPORT_EVERY_S = 30.0
"""How often a bar says something where there is no terminal to draw it on."""
PATIENCE_S = 1.0
"""How long the main thread may take to hear of a second Ctrl-C."""


class Terminal:
    """Progress on standard error, as a context.

    Inside it the first Ctrl-C sets `stopped`; the second interrupts at once; so do the
    other `interrupts.SIGNALS`. A process that was started to ignore them goes on
    doing so. `stopped` is also set when it is looked at after `max_seconds`. On a
    terminal bars move and a text stands below them, which is gone at the end; elsewhere
    a bar is a line now and then.

    Args:
      last_words: what there is after the second Ctrl-C, if the main thread hears of
        nothing because a compiler has it; called from another thread, before the
        process ends.
      max_seconds: from now on; above 0.

    Attributes:
      has_stopped: whether somebody who looked was told to stop.

    Raises:
      ValueError: `max_seconds` is not above 0.
    """

    def __init__(
        self,
        last_words: Callable[[], str] = lambda: "interrupted at once",
        max_seconds: float = math.inf,
    ) -> None:
        if not max_seconds > 0:
            raise ValueError(f"--max-seconds {max_seconds:g}: must be above 0")
        self.has_stopped = False
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
        """Whether Ctrl-C was pressed or the time is up."""
        if not self.has_stopped and time.monotonic() >= self._end_s:
            self.has_stopped = True
            self._console.print("time is up: stopping after this piece")
        return self.has_stopped

    @property
    def left_s(self) -> float:
        """Seconds until the time is up."""
        return self._end_s - time.monotonic()

    @property
    def status(self) -> int:
        """The exit status of work that was stopped, if it was: by whom."""
        if self._signal:
            return interrupts.status_of(self._signal)
        return interrupts.RESUMABLE if self.has_stopped else 0

    @property
    def reason(self) -> str:
        """Why work was stopped, for a person."""
        return "time is up" if self.status == interrupts.RESUMABLE else "interrupted"

    def __enter__(self) -> Self:
        """Starts the display and takes over Ctrl-C."""
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
        """Leaves the bars as they stand and gives Ctrl-C back."""
        self._is_left.set()
        self._exits.close()

    def bar(
        self, label: str, total: float | None, unit: str
    ) -> Callable[[float], None]:
        """Opens a bar with rate and time left."""
        task = self._bars.add_task(label, total=total, rate="")
        started_s = said_s = time.monotonic()

        def update(done: float) -> None:
            nonlocal said_s
            speed = self._bars.tasks[task].speed
            # The speed of the last moments; of a whole it would say little.
            is_shown = speed and done != total
            rate = f"{units.format_rate(speed)} {unit}/s" if is_shown else ""
            self._bars.update(task, completed=done, rate=rate)
            now_s = time.monotonic()
            is_time = done == total or now_s - said_s > REPORT_EVERY_S
            if is_time and not self._console.is_terminal:
                said_s = now_s
                of = f" of {total:,.0f}" if total is not None else ""
                spent = f"{now_s - started_s:,.1f} s"
                self._console.print(f"{label}: {done:,.0f}{of} {unit}, {spent}")

        return update

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        """Yields the items under a bar, until they end or Ctrl-C is pressed."""
        update = self.bar(label, len(items) if isinstance(items, Sized) else None, unit)
        for done, item in enumerate(items, 1):
            if self.stopped:
                return
            yield item
            update(done)

    def show(self, content: str) -> None:
        """Replaces the text that stands under the bars."""
        below = text.Text(content, "dim", no_wrap=True, overflow="crop")
        shown = [self._bars, below] if content else [self._bars]
        self._live.update(rich_console.Group(*shown))

    def _hear(self, number: int) -> None:
        """Runs at once when Ctrl-C is pressed, in a thread of its own."""
        self._signal = number
        self._num_heard += 1
        self.has_stopped = True
        if self._num_heard == 1:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            again = f"stopping after this piece; {name} again stops at once"
            self._console.print(again)
        elif not self._is_left.wait(PATIENCE_S):
            self._live.stop()
            interrupts.exit_now(self._last_words(), self.status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs when Python has its turn; several presses may have become one."""
        self._signal = number
        self._num_handled += 1
        self.has_stopped = True
        if max(self._num_heard, self._num_handled) > 1:
            self._is_left.set()
            raise interrupts.WorkStopped(status=self.status)
