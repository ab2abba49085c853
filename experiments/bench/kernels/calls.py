"""What is timed: a call on a shape, ready and checked, who makes it, and the time."""

import contextlib
import functools
import time
import typing
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.bench import (
    GroupedProblem,
    Problem,
    Timing,
    grouped_specs,
    problems,
)

MAX_ERROR = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest error, by type, with which an answer counts as one."""
SHARE = 0.1
"""Of the time, for each that is timed elsewhere: some compile for seconds a shape."""

now_s = time.monotonic
"""The clock; tests put another one in its place."""


class Run(NamedTuple):
    """An implementation on a shape.

    Attributes:
      call: makes call number i; returns arrays to wait for.
      error: how far a result is from the right one, as `problems.error` says it.
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
      has_share: whether it may use a share of the time alone.
    """

    name: str
    is_peer: bool
    prepare: Callable[[Any], Run]
    has_share: bool = False


def implementations(
    names: typing.TypeAliasType,
    ours: Callable[[Any, Any], Run],
    peers: Mapping[str, Callable[[Any], Run]],
) -> list[Implementation]:
    """Lists all that do some work here: ours under every name, then peers.

    Args:
      names: a literal of those of ours.
      ours: makes a run of ours, of its name and a problem.
      peers: make one, by name.
    """
    return [
        *(
            Implementation(name, False, functools.partial(ours, name))
            for name in typing.get_args(names.__value__)
        ),
        *(Implementation(name, True, prepare) for name, prepare in peers.items()),
    ]


def make_run(
    problem: Problem | GroupedProblem,
    function: Callable[..., Any],
    turns: Sequence[tuple[Any, ...]],
) -> Run:
    """Makes a run of a function that is jitted, and of its arguments in every turn."""
    jitted = jax.jit(function)
    held = grouped_specs if isinstance(problem, GroupedProblem) else problems

    def call(index: int) -> jax.Array:
        return jitted(*turns[index % len(turns)])

    return Run(call, lambda: held.error(typing.cast(Any, problem), call(0)))


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
        """Says why something is not to be begun; None if it may.

        Args:
          name: whose share it needs; empty where nobody's.
        """
        if self.left_s() <= 0:
            return f"skipped: the {self.seconds:g} s were over"
        share_s = SHARE * self.seconds
        if name and self._used_s.get(name, 0.0) > share_s:
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
