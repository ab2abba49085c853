"""What is timed: a call on a shape, ready and checked, who makes it, and the time."""

import collections
import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.bench import GroupedProblem, Problem, Timing

MAX_ERROR = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest error, by type, with which an answer counts as one."""

now_s = time.monotonic
"""The clock; tests put another one in its place."""


class Run(NamedTuple):
    """An implementation on a shape.

    Attributes:
      call: makes call number i; returns arrays to wait for.
      error: how far a result is from the right one, as `Problem.error` says it.
      measure: gives the times of calls made elsewhere; None where `call` is timed here.
      plan: makes what `call` was given ready, once a step for all layers, and is timed
        apart; None where there is nothing to prepare.
      merge: puts arrays together as `call` does when its kernel is done, and is timed
        apart, too; None where there is nothing to merge.
      plan_s: seconds of a plan that was timed elsewhere.
      how: the way it was done, where there are several.
    """

    call: Callable[[int], Any]
    error: Callable[[], float]
    measure: Callable[[], Timing] | None = None
    plan: Callable[[int], Any] | None = None
    merge: Callable[[int], Any] | None = None
    plan_s: float | None = None
    how: str = ""


class Implementation(NamedTuple):
    """Something that is timed.

    Attributes:
      name: as rows give it.
      is_peer: whether it is held against ours.
      prepare: makes a run; refuses with a ValueError that says why.
      share: of the time, which it may use alone.
    """

    name: str
    is_peer: bool
    prepare: Callable[[Any], Run]
    share: float = 1.0


def make_run(
    problem: Problem | GroupedProblem,
    function: Callable[..., Any],
    turns: Sequence[tuple[Any, ...]],
) -> Run:
    """Makes a run of a function that is jitted, and of its arguments in every turn."""
    jitted = jax.jit(function)

    def call(index: int) -> jax.Array:
        return jitted(*turns[index % len(turns)])

    return Run(call, lambda: problem.error(call(0)))


class Budget:
    """Seconds from now on, for all together and in shares.

    Args:
      seconds: what the whole may take, above 0. Nothing is begun after that; what has
        begun in this process ends when it ends.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end_s = now_s() + seconds
        self._used_s = collections.defaultdict[str, float](float)

    def left_s(self) -> float:
        """Seconds until nothing more is begun; not above 0 when the time is over."""
        return self._end_s - now_s()

    @contextlib.contextmanager
    def spend(self, name: str, share: float) -> Generator[None]:
        """Counts the time in the context as used by that name, of its share.

        Raises:
          ValueError: that share is over, or the whole time.
        """
        if self.left_s() <= 0:
            raise ValueError(f"skipped: the {self.seconds:g} s were over")
        if self._used_s[name] > (share_s := share * self.seconds):
            raise ValueError(f"skipped: its share of the time, {share_s:g} s, was over")
        start_s = now_s()
        try:
            yield
        finally:
            self._used_s[name] += now_s() - start_s
