"""A kernel call on a shape, ready to be checked and timed, and its implementation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.bench import GroupedProblem, Problem, Timing

MAX_ERROR = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest error, by type, with which an answer counts as one."""


class KernelRun(NamedTuple):
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
    prepare: Callable[[Any], KernelRun]
    share: float = 1.0


def make_run(
    problem: Problem | GroupedProblem,
    function: Callable[..., Any],
    turns: Sequence[tuple[Any, ...]],
) -> KernelRun:
    """Makes a run of a function that is jitted, and of its arguments in every turn."""
    jitted = jax.jit(function)

    def call(index: int) -> jax.Array:
        return jitted(*turns[index % len(turns)])

    return KernelRun(call, lambda: problem.error(call(0)))
