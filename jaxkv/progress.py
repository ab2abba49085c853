"""How a long computation tells a person how far it is, and hears when to stop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """What a long computation is given to report to.

    It calls `track` or `bar` as it goes, looks at `stopped` between pieces of
    work (as `track` does by itself), and when it is set returns what it has.
    """

    @property
    def stopped(self) -> bool:
        """Whether the person asked to stop."""
        ...

    def bar(
        self, label: str, total: int | float | None, unit: str
    ) -> Callable[[float], None]:
        """Opens a bar; the function returned takes how much is done, of `total`."""
        ...

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        """Yields the items under a bar, until they end or the person stops them."""
        ...

    def show(self, content: str) -> None:
        """Replaces the text that stands under the bars."""
        ...


class Quiet:
    """Progress that tells nobody and never stops."""

    stopped = False

    def bar(
        self, label: str, total: int | float | None, unit: str
    ) -> Callable[[float], None]:
        """Opens nothing."""
        return lambda done: None

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        """Yields every item."""
        return iter(items)

    def show(self, content: str) -> None:
        """Shows nothing."""


QUIET = Quiet()
