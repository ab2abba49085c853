"""The time that a benchmark may take, and who has used how much of it."""

import contextlib
import time
from collections.abc import Generator

now_s = time.monotonic
"""The clock; tests put another one in its place."""

SHARE = 0.1
"""Of the whole, for each that is timed elsewhere: some compile for seconds a shape."""


class Budget:
    """Seconds from now on, for all together and in shares.

    Args:
      seconds: what the whole may take, above 0. Nothing is begun after that; what has
        begun in this process ends when it ends.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start_s = now_s()
        self._used_s: dict[str, float] = {}

    def left_s(self) -> float:
        """Seconds until nothing more is begun; not above 0 when the time is over."""
        return self._start_s + self.seconds - now_s()

    def why_not(self, name: str) -> str | None:
        """Says why something is not to be begun; None if it may."""
        if self.left_s() <= 0:
            return f"skipped: the {self.seconds:g} s were over"
        share_s = SHARE * self.seconds
        if self._used_s.get(name, 0.0) > share_s:
            return f"skipped: its share of the time, {share_s:g} s, was over"
        return None

    @contextlib.contextmanager
    def spend(self, name: str) -> Generator[None]:
        """Counts the time in the context as used from the share of that name."""
        start_s = now_s()
        try:
            yield
        finally:
            used_s = self._used_s.get(name, 0.0)
            self._used_s[name] = used_s + now_s() - start_s
