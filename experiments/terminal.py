"""The terminal: tables on standard output, progress and Ctrl-C on standard error."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from types import FrameType, TracebackType
from typing import Any, Self

from rich import console as rich_console
from rich import live, progress, table, text

from experiments.reporting import Sheet


def print_sheets(sheets: Sequence[Sheet]) -> None:
    """Prints tables on standard output, as wide as the terminal allows."""
    console = rich_console.Console()
    for sheet in sheets:
        grid = table.Table(title=sheet.title or None, title_justify="left")
        for head in sheet.columns:
            grid.add_column(text.Text(head))
        for row in sheet.rows:
            grid.add_row(*map(text.Text, row))
        console.print(grid)


class Terminal:
    """Progress on standard error, as a context.

    Inside it the first Ctrl-C sets `stopped`; the second interrupts at once.
    """

    def __init__(self, console: rich_console.Console | None = None) -> None:
        self.stopped = False
        self._console = console or rich_console.Console(stderr=True)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
        )
        self._live = live.Live(self._bars, console=self._console)
        self._before: Any = None

    def __enter__(self) -> Self:
        """Starts the display and takes over Ctrl-C (in the main thread)."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._stop)
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the display as it stands and gives Ctrl-C back."""
        self._live.stop()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def bar(
        self, label: str, total: float | None, unit: str
    ) -> Callable[[float], None]:
        """Opens a bar with rate and time left."""
        task = self._bars.add_task(label, total=total, rate="")

        def update(done: float) -> None:
            speed = self._bars.tasks[task].speed
            rate = f"{speed:.4g} {unit}/s" if speed else ""
            self._bars.update(task, completed=done, rate=rate)

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
        self._live.update(rich_console.Group(self._bars, text.Text(content)))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        self._console.print("stopping after this piece; Ctrl-C again stops at once")
