"""Device time of calls, and the ceilings of the device that they are held against.

On a GPU the time is that of the kernels alone, as CUPTI records them; on a CPU it is
that of calls that are waited for. Both are medians.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import devices

COLD = 4
"""Calls pass over so many times the last cache before they come back to a page."""


class Timing(NamedTuple):
    """How long a call takes.

    Attributes:
      seconds: median.
      spread: from the tenth to the ninetieth of a hundred, by the median; None where
        only the mean is known.
      num_kernels: that one call launches; None where nobody counts.
      longest_s: median of the longest of them; None where nobody counts.
      clock: "cupti", the time of its kernels; "wall", of a call waited for; "queue",
        of one among calls that are waited for together.
    """

    seconds: float
    spread: float | None
    num_kernels: int | None
    longest_s: float | None
    clock: Literal["cupti", "wall", "queue"]


class Ceilings(NamedTuple):
    """What the device reaches, measured as the calls are.

    Attributes:
      copy_bytes_per_s: bytes read and written by a pass that changes an array.
      read_bytes_per_s: bytes read by a sum.
      flops_per_s: of a square matrix product.
      empty_call_s: a call that does next to nothing: the fixed cost of a kernel.
      clock: as that of a timing.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: float
    empty_call_s: float
    clock: str

    def floor_s(self, num_bytes: int, flops: int) -> float:
        """Least time in which bytes are moved and operations done, side by side."""
        bytes_per_s = max(self.copy_bytes_per_s, self.read_bytes_per_s)
        return max(num_bytes / bytes_per_s, flops / self.flops_per_s)

    def target_s(
        self, num_bytes: int, flops: int, fixed_s: float | None = None
    ) -> float:
        """Time that a good kernel takes: nine tenths of the rates, and its fixed cost.

        With 4.3 TB/s and an empty call of 5 us, 33.6 MB take 7.8 / 0.9 + 5 = 13.7 us.

        Args:
          num_bytes: to be moved.
          flops: to be done.
          fixed_s: `measure_empty` of as many kernels; None means an empty call.
        """
        fixed_s = self.empty_call_s if fixed_s is None else fixed_s
        return self.floor_s(num_bytes, flops) / 0.9 + fixed_s


def num_turns(num_bytes: int, kind: str) -> int:
    """Calls over different pages, after which the first ones have left the cache.

    Args:
      num_bytes: that one call moves.
      kind: of device; one whose cache is not known is measured warm.
    """
    return max(1, -(-COLD * devices.L2_BYTES.get(kind, 0) // num_bytes))


def measure(call: Callable[[int], Any], *, num_calls: int = 30) -> Timing:
    """Times calls on the default device.

    Args:
      call: makes call number i, jitted, and returns its arrays. Arrays that a later
        call takes away may not be returned.
      num_calls: calls that are timed, at least 2; fewer where they are slow.

    Returns:
      The times; a GPU without CUPTI gets the clock "queue".
    """
    jax.block_until_ready(call(0))
    once_s = _stopwatch(lambda: call(1))
    num_calls = max(2, min(num_calls, int(1 / once_s)))
    if devices.current_target().platform != "gpu":
        return _wall(call, num_calls)
    return _cupti(call, num_calls) or _queue(call, num_calls)


def measure_empty(*, num_kernels: int = 1, num_calls: int = 10) -> Timing:
    """Times a call that does next to nothing, with so many kernels one by one.

    Args:
      num_kernels: at least 1; each waits for the one before.
      num_calls: calls that are timed.
    """
    one, plus = jnp.zeros((1,), jnp.float32), jax.jit(lambda x: x + 1)

    def call(index: int) -> jax.Array:
        x = one
        for _ in range(num_kernels):
            x = plus(x)
        return x

    return measure(call, num_calls=num_calls)


def measure_ceilings(
    *, num_elements: int, width: int, dtype: str, num_calls: int = 10
) -> Ceilings:
    """Measures the ceilings of the default device, on random numbers.

    Args:
      num_elements: of the arrays that are read and written, 4 bytes each.
      width: of the matrices that are multiplied.
      dtype: of those.
      num_calls: calls of each.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    words = [jax.random.bits(keys[0], (num_elements,), jnp.uint32)]
    change = jax.jit(lambda x: x ^ jnp.uint32(1), donate_argnums=0)

    def copy(index: int) -> None:
        words[0] = change(words[0])
        words[0].block_until_ready()

    add = jax.jit(lambda x: jnp.sum(x, dtype=jnp.uint32))
    copied = measure(copy, num_calls=num_calls)
    read = measure(lambda index: add(words[0]), num_calls=num_calls)
    words.clear()
    shape = (width, width)
    a, b = (jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys[1:])
    product = measure(lambda index: _product(a, b), num_calls=num_calls)
    empty = measure_empty(num_calls=num_calls)
    return Ceilings(
        copy_bytes_per_s=2 * 4 * num_elements / copied.seconds,
        read_bytes_per_s=4 * num_elements / read.seconds,
        flops_per_s=2 * width**3 / product.seconds,
        empty_call_s=empty.seconds,
        clock=empty.clock,
    )


@jax.jit
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def _stopwatch(work: Callable[[], Any]) -> float:
    """Seconds until the arrays that work returns are there."""
    start_s = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start_s


def _wall(call: Callable[[int], Any], num_calls: int) -> Timing:
    turns = (functools.partial(call, index) for index in range(num_calls))
    return _timing([*map(_stopwatch, turns)], "wall")


def _queue(call: Callable[[int], Any], num_calls: int) -> Timing:
    def together() -> list[Any]:
        return [call(index) for index in range(num_calls)]

    return _timing([_stopwatch(together) / num_calls for _ in range(3)], "queue")


def _cupti(call: Callable[[int], Any], num_calls: int) -> Timing | None:
    """Sums the times of each call's kernels; None where CUPTI tells nothing."""
    from jax.experimental.mosaic.gpu import profiler

    run = profiler.measure(_Turns(call), aggregate=False, iterations=num_calls)
    try:
        _, calls = run()
    except (RuntimeError, ImportError):
        return None
    if not calls:
        return None
    seconds = [sum(ms for _, ms in kernels) / 1e3 for kernels in calls]
    by_kernel = [[ms / 1e3 for _, ms in kernels] for kernels in calls]
    longest_s = max(map(statistics.median, zip(*by_kernel, strict=True)))
    return _timing(seconds, "cupti", num_kernels=len(calls[0]), longest_s=longest_s)


class _Turns:
    """Calls with a number, in the shape of a jitted function.

    The profiler would jit anything else; these are several calls of jitted functions,
    each with arguments of its own.
    """

    def __init__(self, call: Callable[[int], Any]) -> None:
        self._calls = map(call, itertools.count())

    def __call__(self) -> Any:
        return next(self._calls)

    def lower(self) -> Any:
        """Makes it a `jax.stages.Wrapped`, which is all that the profiler asks."""
        raise TypeError("several calls have no one program to lower")

    trace = lower


def _timing(
    seconds: list[float],
    clock: Any,
    *,
    num_kernels: int | None = None,
    longest_s: float | None = None,
) -> Timing:
    middle = statistics.median(seconds)
    ranked = sorted(seconds)
    low, high = (ranked[round(share * (len(ranked) - 1))] for share in (0.1, 0.9))
    return Timing(middle, (high - low) / middle, num_kernels, longest_s, clock)
