"""Progress reporters that stop an experiment at a chosen point."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from jaxkv.progress import Quiet


class Impatient(Quiet):
    """Stops when the named work begins its second piece."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.stopped = False

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        for i, item in enumerate(items):
            if self.stopped:
                return
            self.stopped = label == self.label and i == 1
            yield item


class Stopping(Quiet):
    """Stops after `after` reports, or raises an error.

    Args:
      after: number of reports; 0 stops before the start.
      of: counted reports: updates of bars, or lines shown.
      error: raised in place of the stop.
    """

    def __init__(
        self,
        after: int,
        of: Literal["bar", "show"] = "bar",
        error: BaseException | None = None,
    ) -> None:
        self.left = after
        self.of = of
        self.error = error
        self.stopped = after == 0
        self.total: float | None = None
        self.done: list[float] = []

    def bar(
        self, label: str, total: float | None, unit: str
    ) -> Callable[[float], None]:
        def update(done: float) -> None:
            assert total is None or done <= total
            self.done.append(done)
            if done > 0:
                self._count("bar")

        self.total = total
        return update

    def show(self, content: str) -> None:
        self._count("show")

    def _count(self, of: str) -> None:
        self.left -= of == self.of
        if self.left == 0 and of == self.of:
            if self.error is not None:
                raise self.error
            self.stopped = True
