"""A person who stops an experiment, at a place that the test names."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from jaxkv.progress import Quiet


class Impatient(Quiet):
    """Stops when the named work has begun its second piece."""

    def __init__(self, label: str) -> None:
        self.label, self.stopped = label, False

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        for i, item in enumerate(items):
            if self.stopped:
                return
            self.stopped = label == self.label and i == 1
            yield item


class Stopping(Quiet):
    """Asks to stop after so many reports, or raises what it is given.

    Args:
      after: how many; after 0 it has asked before anything begins.
      of: whether those of bars count that something is done, or the lines shown.
      error: raised instead of asking.
    """

    def __init__(
        self,
        after: int,
        of: Literal["bar", "show"] = "bar",
        error: BaseException | None = None,
    ) -> None:
        self.left, self.of, self.error = after, of, error
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
