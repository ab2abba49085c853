"""How long computations report progress and learn that they should stop."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receives the progress of a long computation.

    The computation calls `track` or `bar` as it runs. It reads `stopped` between pieces
    of work (`track` does so itself) and, once that is True, returns its partial result.
    """

    @property
    def stopped(self) -> bool:
        """True if the user asked to stop."""
        ...

    def bar(
        self, label: str, total: int | float | None, unit: str
    ) -> Callable[[float], None]:
        """Opens a progress bar.

        Args:
          label: text next to the bar.
          total: amount of work, in `unit`; None if unknown.
          unit: unit of the amounts.

        Returns:
          A function that takes the amount of work done so far.
        """
        ...

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        """Yields the items under a progress bar, until they end or the user stops."""
        ...

    def show(self, content: str) -> None:
        """Replaces the text below the bars."""
        ...

    def log(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Records the numbers of a step, such as a loss; does not change the work."""
        ...


class Quiet:
    """Progress that displays no output and never stops."""

    stopped = False

    def bar(
        self, label: str, total: int | float | None, unit: str
    ) -> Callable[[float], None]:
        """Returns a function that ignores its argument."""
        return lambda done: None

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        """Yields every item."""
        return iter(items)

    def show(self, content: str) -> None:
        """Ignores the text."""

    def log(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Ignores the numbers."""


QUIET = Quiet()
