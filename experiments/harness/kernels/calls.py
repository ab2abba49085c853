"""A kernel call on a shape that can be checked and timed, and its implementation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, PyTree

from pallas_kernels.bench import AttentionProblem, GroupedProblem, Timing

MAX_ERROR = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest relative error of a correct result, by type."""


class KernelRun(NamedTuple):
    """An implementation, prepared for a shape.

    Attributes:
      call: makes call number i; returns arrays to wait for.
      error: returns the error of a result, as defined by the problem's `error`.
      measure: returns the timing of calls in another process; None if `call` is timed
        here.
      plan: prepares the arguments of `call`, once per step for all layers, and is timed
        separately; None without preparation.
      merge: merges partial results as `call` does after its kernel, and is timed
        separately; None without a merge.
      plan_s: seconds of a plan that was timed in another process.
      how: name of the variant, if there are several.
    """

    call: Callable[[int], PyTree[Array]]
    error: Callable[[], float]
    measure: Callable[[], Timing] | None = None
    plan: Callable[[int], PyTree[Array]] | None = None
    merge: Callable[[int], PyTree[Array]] | None = None
    plan_s: float | None = None
    how: str = ""


class Implementation(NamedTuple):
    """An implementation to be timed.

    Attributes:
      name: name in tables.
      is_peer: True for a peer, False for a kernel of this project.
      prepare: makes a run; raises ValueError with the reason if it cannot.
      share: largest share of the total time.
    """

    name: str
    is_peer: bool
    prepare: Callable[[Any], KernelRun]
    share: float = 1.0


def make_run(
    problem: AttentionProblem | GroupedProblem,
    function: Callable[..., jax.Array],
    turns: Sequence[tuple[object, ...]],
) -> KernelRun:
    """Makes a run of a function, which is jitted, with the arguments of every turn."""
    jitted = jax.jit(function)

    def call(index: int) -> jax.Array:
        return jitted(*turns[index % len(turns)])

    return KernelRun(call, lambda: problem.error(call(0)))
