"""What peers in torch have in common: the shape, what is right, and the fastest way.

A question is a shape as `Shape` takes it, with `num_turns`, `num_calls` and `max_error`
beside it. It is answered with `{"error", "timing", "plan_s", "how"}`, or `{"refused":
why}`. `error` is the norm of the difference to attention in float64, at some rows, by
the norm of that; what is not below `max_error` is not timed. `how` says which way was
the fastest, and `plan_s` what that prepares once a step, by the clock on the wall; null
where there is nothing to prepare.
"""

import abc
import statistics
import time

import torch

NUM_CHECKED_ROWS = 16
"""Last rows of a sequence that are held against float64."""


class Shape:
    """Ragged rows behind their contexts.

    Args:
      asked: `contexts`, tokens before the rows of each sequence, of which all have the
        first `shared` in common; `rows` of each; `heads`, those of queries, of keys,
        and their size; `page_size`; `dtype`; `is_tree`, whether rows are the nodes of
        random trees, else each sees those before it.
      device: where arrays are drawn.
    """

    def __init__(self, asked, device):
        self.contexts, self.rows = asked["contexts"], asked["rows"]
        self.q_heads, self.kv_heads, self.head_dim = asked["heads"]
        self.page_size, self.shared = asked["page_size"], asked["shared"]
        self.is_tree = asked["is_tree"]
        self.device, self.dtype = device, getattr(torch, asked["dtype"])
        self.batch = len(self.contexts)
        self.lengths = [context + self.rows for context in self.contexts]
        self.is_equal = len(set(self.contexts)) == 1
        self.kin = self._draw_kin()

    def _draw_kin(self):
        """Which rows each row sees, itself among them: `[batch, rows, rows]`."""
        shape = (self.batch, self.rows, self.rows)
        if not self.is_tree:
            return torch.ones(shape, dtype=torch.bool, device=self.device).tril()
        kin = torch.zeros(shape, dtype=torch.bool)
        for tree in kin:
            for row in range(self.rows):
                if row:
                    tree[row] = tree[int(torch.randint(0, row, ()))]
                tree[row, row] = True
        return kin.to(self.device)

    def random(self, *shape):
        """Normal numbers."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def queries(self):
        """Queries: `[batch, q_heads, rows, head_dim]`."""
        return self.random(self.batch, self.q_heads, self.rows, self.head_dim)

    def seen(self, length):
        """Which places each row sees: `[batch, rows, length]`."""
        shape = (self.batch, self.rows, length)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for i, context in enumerate(self.contexts):
            seen[i, :, :context] = True
            seen[i, :, context : context + self.rows] = self.kin[i]
        return seen

    def tables(self, *, may_share):
        """Pages of each sequence in random order, and how many there are.

        Args:
          may_share: whether the shared prefix lies in pages of all sequences.
        """
        num_shared = self.shared // self.page_size if may_share else 0
        counts = [-(-length // self.page_size) for length in self.lengths]
        num_pages = num_shared + sum(count - num_shared for count in counts)
        free = torch.randperm(num_pages).tolist()
        prefix, rest = free[:num_shared], free[num_shared:]
        tables = []
        for count in counts:
            own = count - num_shared
            tables.append([*prefix, *rest[:own]])
            rest = rest[own:]
        return tables, num_pages

    def error(self, q, keys, out):
        """Holds the first and the longest sequence, their last rows, to float64.

        Args:
          q: queries.
          keys: gives keys and values of KV head 0 of sequence i, `[length, head_dim]`.
          out: the answer, as q.
        """
        group = self.q_heads // self.kv_heads
        rows = slice(max(0, self.rows - NUM_CHECKED_ROWS), None)
        off = norm = 0.0
        for i in (0, self.lengths.index(max(self.lengths))):
            k, v = (x[: self.lengths[i]].double() for x in keys(i))
            scores = q[i, :group, rows].double() @ k.T / self.head_dim**0.5
            kin = self.kin[i, rows]
            before = kin.new_ones(len(kin), self.contexts[i])
            seen = torch.cat([before, kin], dim=1)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            wanted = weights @ v
            off += float(((out[i, :group, rows].double() - wanted) ** 2).sum())
            norm += float((wanted**2).sum())
        return (off / norm) ** 0.5


class Turn:
    """Arrays of one call; calls take turns so that no cache still has them.

    Args:
      q: queries, `[batch, q_heads, rows, head_dim]`.
      keys: as `Shape.error` takes them.
      rest: what a peer's own calls need besides.
    """

    def __init__(self, q, keys, *rest):
        self.q, self.keys, self.rest = q, keys, rest


class Peer(abc.ABC):
    """What peers have in common."""

    def __init__(self, num_threads):
        torch.set_num_threads(int(num_threads))
        torch.set_grad_enabled(False)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.version = torch.__version__

    @abc.abstractmethod
    def draw(self, shape):
        """Draws the arrays of a turn."""

    @abc.abstractmethod
    def ways(self, shape, turns):
        """Yields the ways in which it attends, ready for these turns.

        Each is how, in a word or two; a call that attends in a turn, its output as the
        queries lie; and the seconds that preparing a step took, or None.
        """

    def answer(self, asked):
        """Checks every way and times those that are right."""
        torch.manual_seed(0)
        shape = Shape(asked, self.device)
        try:
            return self._best(shape, asked)
        except Exception as error:  # of a library's, of a compiler's: it goes on
            said = " ".join(str(error).split())[:200]
            refusal = isinstance(error, ValueError)
            return {"refused": said if refusal else f"{type(error).__name__}: {said}"}
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()  # the others need it

    def _best(self, shape, asked):
        turns = [self.draw(shape) for _ in range(asked["num_turns"])]
        found, refusals = [], []
        for how, call, plan_s in self.ways(shape, turns):
            try:
                answer = _check_and_time(shape, turns, call, asked, self.device)
                found.append({**answer, "plan_s": plan_s, "how": how})
            except RuntimeError as error:  # shapes that it does not take, no memory
                said = " ".join(str(error).split())[:120]
                refusals.append(f"{how}: {said}" if how else said)
        if not found:
            raise ValueError("; ".join(refusals))
        return min(found, key=lambda answer: answer["timing"]["seconds"])


def _check_and_time(shape, turns, call, asked, device):
    error = shape.error(turns[0].q, turns[0].keys, call(turns[0]))
    if not error <= asked["max_error"]:
        raise RuntimeError(f"its answer is wrong: error={error:.2g}")
    return {
        "error": error,
        "timing": measure(call, turns, asked["num_calls"], device),
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
    """Times calls in turns, as `pallas_kernels.bench.timing` does ours."""

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
    return _timing(middle, "wall", spread=(high - low) / middle)


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
    return dict(
        seconds=seconds,
        spread=spread,
        num_kernels=num_kernels,
        longest_s=longest_s,
        clock=clock,
    )
