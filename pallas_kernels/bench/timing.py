"""Device time of calls, and the measured ceilings of the device.

On a GPU the time is the sum of the kernel times that CUPTI records; on a CPU it is the
wall time of blocking calls. Both are medians.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Never

import jax
import jax.numpy as jnp

from pallas_kernels import devices

COLD = 4
"""Bytes that calls move before a page is read again, as a multiple of the L2 cache."""


class Timing(NamedTuple):
    """Device time of a call.

    Attributes:
      seconds: median.
      spread: difference of the 90th and 10th percentiles over the median; None if only
        the mean is known.
      num_kernels: kernels that one call launches; None if they are not counted.
      longest_s: median time of the longest kernel; None if kernels are not timed.
      clock: "cupti" sums kernel times; "wall" times a blocking call; "queue" is the
        mean over calls that are enqueued together.
    """

    seconds: float
    spread: float | None
    num_kernels: int | None
    longest_s: float | None
    clock: Literal["cupti", "wall", "queue"]


class Ceilings(NamedTuple):
    """Highest rates that the device reaches, measured with the same clock as calls.

    Attributes:
      copy_bytes_per_s: bytes read and written by an elementwise pass over an array.
      read_bytes_per_s: bytes read by a sum.
      flops_per_s: rate of a square matrix product.
      empty_call_s: time of a call with one trivial kernel, the fixed cost of a kernel.
      clock: clock of the measurements, as in `Timing`.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: float
    empty_call_s: float
    clock: str

    def floor_s(self, num_bytes: int, flops: int) -> float:
        """Returns the least time for bytes and operations that overlap fully."""
        bytes_per_s = max(self.copy_bytes_per_s, self.read_bytes_per_s)
        return max(num_bytes / bytes_per_s, flops / self.flops_per_s)

    def target_s(
        self, num_bytes: int, flops: int, fixed_s: float | None = None
    ) -> float:
        """Returns the target time of a kernel: 90 % of the rates, plus its fixed cost.

        With 4.3 TB/s and an empty call of 5 us, 33.6 MB take 7.8 / 0.9 + 5 = 13.7 us.

        Args:
          num_bytes: bytes to move.
          flops: operations to do.
          fixed_s: `measure_empty` with the same number of kernels; None means
            `empty_call_s`.
        """
        fixed_s = self.empty_call_s if fixed_s is None else fixed_s
        return self.floor_s(num_bytes, flops) / 0.9 + fixed_s


def num_turns(num_bytes: int, kind: str) -> int:
    """Returns the number of page tables with which no call finds its keys in the cache.

    Args:
      num_bytes: bytes that one call moves.
      kind: device kind; a device of unknown cache size is measured warm.
    """
    return max(1, -(-COLD * devices.L2_BYTES.get(kind, 0) // num_bytes))


def measure(call: Callable[[int], object], *, num_calls: int = 30) -> Timing:
    """Times calls on the default device.

    Args:
      call: makes call number i, jitted, and returns its arrays. It must not return
        arrays that a later call donates.
      num_calls: number of timed calls, at least 2; fewer are timed if they are slow.

    Returns:
      The timing; on a GPU without CUPTI its clock is "queue".
    """
    jax.block_until_ready(call(0))
    once_s = _stopwatch(lambda: call(1))
    num_calls = max(2, min(num_calls, int(1 / once_s)))
    if devices.current_target().platform != "gpu":
        return _wall(call, num_calls)
    return _cupti(call, num_calls) or _queue(call, num_calls)


def measure_empty(*, num_kernels: int = 1, num_calls: int = 10) -> Timing:
    """Times a call of trivial kernels that run one after another.

    Args:
      num_kernels: kernels of a call, at least 1; each depends on the one before.
      num_calls: number of timed calls.
    """
    one = jnp.zeros((1,), jnp.float32)
    plus = jax.jit(lambda x: x + 1)

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
      num_elements: elements of the arrays that are read and written, 4 bytes each.
      width: width of the square matrices.
      dtype: type of the matrices.
      num_calls: number of timed calls of each measurement.
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


def _stopwatch(work: Callable[[], object]) -> float:
    """Returns the seconds until the arrays that `work` returns are ready."""
    start_s = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start_s


def _wall(call: Callable[[int], object], num_calls: int) -> Timing:
    turns = (functools.partial(call, index) for index in range(num_calls))
    return _timing([*map(_stopwatch, turns)], "wall")


def _queue(call: Callable[[int], object], num_calls: int) -> Timing:
    def together() -> list[object]:
        return [call(index) for index in range(num_calls)]

    return _timing([_stopwatch(together) / num_calls for _ in range(3)], "queue")


def _cupti(call: Callable[[int], object], num_calls: int) -> Timing | None:
    """Returns the sums of kernel times, or None if CUPTI is not available."""
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
    """A counter of calls with the interface of a jitted function.

    The profiler jits any other callable; one call here is several jitted functions with
    their own arguments.
    """

    def __init__(self, call: Callable[[int], object]) -> None:
        self._calls = map(call, itertools.count())

    def __call__(self) -> object:
        return next(self._calls)

    def lower(self) -> Never:
        """Makes the object a `jax.stages.Wrapped`, the profiler's only requirement."""
        raise TypeError("several calls have no one program to lower")

    trace = lower


def _timing(
    seconds: list[float],
    clock: Literal["cupti", "wall", "queue"],
    *,
    num_kernels: int | None = None,
    longest_s: float | None = None,
) -> Timing:
    middle = statistics.median(seconds)
    ranked = sorted(seconds)
    low, high = (ranked[round(share * (len(ranked) - 1))] for share in (0.1, 0.9))
    return Timing(middle, (high - low) / middle, num_kernels, longest_s, clock)
