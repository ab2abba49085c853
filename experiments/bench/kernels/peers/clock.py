"""A peer's answer: of all its ways that are right, the fastest. In torch."""

import abc
import statistics
import time

import torch

from experiments.bench.kernels.peers.shapes import Shape


class Turn:
    """Arrays of one call; calls take turns so that no cache still has them.

    Args:
      q: queries, `[batch, q_heads, rows, head_dim]`.
      keys: as `Shape.error` takes them.
      rest: what a peer's own calls need besides.
    """

    def __init__(self, q, keys, *rest):
        self.q, self.keys, self.rest = q, keys, rest


class Way:
    """One of the ways in which a peer does it.

    Args:
      how: in a word or two.
      call: attends in a turn; gives the output as the queries lie.
      plan_s: seconds that preparing a step took, None if there is nothing to prepare.
    """

    def __init__(self, how, call, plan_s=None):
        self.how, self.call, self.plan_s = how, call, plan_s


class Peer(abc.ABC):
    """What peers have in common."""

    def __init__(self, num_threads):
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.version = torch.__version__

    @abc.abstractmethod
    def draw(self, shape):
        """Draws the arrays of a turn."""

    @abc.abstractmethod
    def ways(self, shape, turns):
        """Yields the ways in which it attends, ready for these turns."""

    def answer(self, asked):
        """Checks every way and times those that are right."""
        torch.manual_seed(0)
        shape = Shape(asked, self.device)
        try:
            turns = [self.draw(shape) for _ in range(asked["num_turns"])]
            best, refusals = None, []
            for way in self.ways(shape, turns):
                found = self._try(shape, turns, way, asked)
                if isinstance(found, str):
                    refusals.append(f"{way.how}: {found}" if way.how else found)
                elif not best or found["timing"]["seconds"] < best["timing"]["seconds"]:
                    best = found
            if best is None:
                raise ValueError("; ".join(refusals))
            return best
        finally:
            turns = way = None
            if self.device == "cuda":
                torch.cuda.empty_cache()  # the others need it

    def _try(self, shape, turns, way, asked):
        """An answer, or why there is none."""
        try:
            out = way.call(turns[0])
            error = shape.error(turns[0].q, turns[0].keys, out)
            del out
            if not error <= asked["max_error"]:
                return f"its answer is wrong: error={error:.2g}"
            timing = measure(way.call, turns, asked["num_calls"], self.device)
        except RuntimeError as error:  # shapes that it does not take, no memory
            return " ".join(str(error).split())[:120]
        return {
            "error": error,
            "timing": timing,
            "plan_s": way.plan_s,
            "how": way.how,
        }


def stopwatch(work, device):
    """Does the work once more than it is timed; gives seconds by the wall, and it."""
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    done = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, done


def measure(call, turns, num_calls, device):
    """Times calls in turns, as `pallas_kernels.benchmarking` does ours."""

    def take(index):
        return call(turns[index % len(turns)])

    take(0)
    if device == "cuda":
        return _profile(take, num_calls)
    seconds = []
    for index in range(1, 1 + num_calls):
        start = time.perf_counter()
        take(index)
        seconds.append(time.perf_counter() - start)
        if sum(seconds) > 1:
            break
    seconds.sort()
    last, middle = len(seconds) - 1, statistics.median(seconds)
    low, high = seconds[round(0.1 * last)], seconds[round(0.9 * last)]
    spread = (high - low) / middle
    return _timing(middle, "wall", spread=spread)


def _profile(call, num_calls):
    """Sums the times of the kernels, as ours are; means, without a spread."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for index in range(1, 1 + num_calls):
            call(index)
        torch.cuda.synchronize()
    events = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    if not events:
        raise RuntimeError("the profiler saw no kernel")
    times = [x.self_device_time_total / 1e6 / num_calls for x in events]
    count = round(sum(x.count for x in events) / num_calls)
    # Of a kernel that a call launches more than once this is one launch.
    longest = max(x.self_device_time_total / 1e6 / x.count for x in events)
    return _timing(sum(times), "cupti", num_kernels=count, longest_s=longest)


def _timing(seconds, clock, spread=None, num_kernels=None, longest_s=None):
    return {
        "seconds": seconds,
        "spread": spread,
        "num_kernels": num_kernels,
        "longest_s": longest_s,
        "clock": clock,
    }
