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
        and their size; `page_size`; `dtype`; `ancestors`, which rows each row sees,
        itself among them, [batch, rows, rows], or null where it sees those before it.
      device: where arrays are drawn.
    """

    def __init__(self, asked, device):
        self.contexts, self.rows = asked["contexts"], asked["rows"]
        self.q_heads, self.kv_heads, self.head_dim = asked["heads"]
        self.page_size, self.shared = asked["page_size"], asked["shared"]
        self.device, self.dtype = device, getattr(torch, asked["dtype"])
        self.batch = len(self.contexts)
        self.lengths = [context + self.rows for context in self.contexts]
        self.is_equal = len(set(self.contexts)) == 1
        self.is_tree = asked["ancestors"] is not None
        ones = torch.ones(self.batch, self.rows, self.rows, dtype=torch.bool)
        kin = torch.tensor(asked["ancestors"]) if self.is_tree else ones.tril()
        self.kin = kin.to(device)

    def random(self, *shape):
        """Normal numbers."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def queries(self):
        """Queries: `[batch, q_heads, rows, head_dim]`."""
        return self.random(self.batch, self.q_heads, self.rows, self.head_dim)

    def seen(self, i, length):
        """Which of the first places each row of sequence i sees: `[rows, length]`."""
        context, place = self.contexts[i], torch.arange(length, device=self.device)
        seen = (place < context).repeat(self.rows, 1)
        seen[:, context : context + self.rows] = self.kin[i]
        return seen

    def tables(self, *, may_share):
        """Pages of each sequence in random order, and how many there are.

        Args:
          may_share: whether the shared prefix lies in pages of all sequences.
        """
        num_shared = self.shared // self.page_size if may_share else 0
        own = [-(-length // self.page_size) - num_shared for length in self.lengths]
        prefix, *rest = torch.randperm(num_shared + sum(own)).split([num_shared, *own])
        tables = [[*prefix.tolist(), *pages.tolist()] for pages in rest]
        return tables, num_shared + sum(own)

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
            length = self.lengths[i]
            k, v = (x[:length].double() for x in keys(i))
            scores = q[i, :group, rows].double() @ k.T / self.head_dim**0.5
            hidden = ~self.seen(i, length)[rows]
            wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
            off += float(((out[i, :group, rows].double() - wanted) ** 2).sum())
            norm += float((wanted**2).sum())
        return (off / norm) ** 0.5


class TorchPeer(abc.ABC):
    """What peers have in common.

    Raises:
      ValueError: it needs a GPU, and there is none.
    """

    version = torch.__version__
    needs_gpu = False

    def __init__(self, num_threads):
        torch.set_num_threads(int(num_threads))
        torch.set_grad_enabled(False)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.needs_gpu and self.device == "cpu":
            raise ValueError("it needs a GPU")

    @abc.abstractmethod
    def draw(self, shape):
        """Draws the arrays of a turn, so many that no cache has them in the next.

        Gives queries, `[batch, q_heads, rows, head_dim]`; `keys` as `Shape.error` takes
        it; and what its calls need besides.
        """

    @abc.abstractmethod
    def ways(self, shape, turns):
        """Yields the ways in which it attends.

        Each is how, in a word or two; a call for each turn, ready, its output as the
        queries lie; and the seconds that preparing a step took, or None.
        """

    def answer(self, asked):
        """Checks every way and times those that are right."""
        torch.manual_seed(0)
        try:
            return self._best(Shape(asked, self.device), asked)
        except Exception as error:  # of a library's, of a compiler's: it goes on
            message = " ".join(str(error).split())[:200]
            refusal = isinstance(error, ValueError)
            return {
                "refused": message if refusal else f"{type(error).__name__}: {message}"
            }
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()  # the others need it

    def _best(self, shape, asked):
        turns = [self.draw(shape) for _ in range(asked["num_turns"])]
        found, refusals = [], []
        q, keys, *_ = turns[0]
        for how, calls, plan_s in self.ways(shape, turns):
            try:
                error = shape.error(q, keys, calls[0]())
                if not error <= asked["max_error"]:
                    raise RuntimeError(f"its answer is wrong: error={error:.2g}")
                timing = measure_calls(calls, asked["num_calls"], self.device)
            except RuntimeError as error:  # shapes that it does not take, no memory
                message = " ".join(str(error).split())[:120]
                refusals.append(f"{how}: {message}" if how else message)
                continue
            found.append(dict(error=error, timing=timing, plan_s=plan_s, how=how))
        if not found:
            raise ValueError("; ".join(refusals))
        return min(found, key=lambda answer: answer["timing"]["seconds"])


def time_work(work, device):
    """Does the work once more than it is timed; gives seconds by the wall, and it."""
    for _ in range(2):
        start = time.perf_counter()
        done = work()
        if device == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - start, done


def measure_calls(calls, num_calls, device):
    """Times calls in turns, as `pallas_kernels.bench.timing` does ours."""
    calls[0]()
    turns = [calls[index % len(calls)] for index in range(1, 1 + num_calls)]
    if device == "cuda":
        return _profile(turns)
    seconds = []
    for call in turns:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        if sum(seconds) > 1:
            break
    seconds.sort()
    last, middle = len(seconds) - 1, statistics.median(seconds)
    low, high = seconds[round(0.1 * last)], seconds[round(0.9 * last)]
    return {"seconds": middle, "spread": (high - low) / middle, "clock": "wall"}


def _profile(turns):
    """Sums the times of the kernels, as ours are; means, without a spread."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in turns:
            call()
        torch.cuda.synchronize()
    events = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    if not events:
        raise RuntimeError("the profiler saw no kernel")
    return {
        "seconds": sum(x.self_device_time_total for x in events) / 1e6 / len(turns),
        "num_kernels": round(sum(x.count for x in events) / len(turns)),
        # Of a kernel that a call launches more than once this is one launch.
        "longest_s": max(x.self_device_time_total / 1e6 / x.count for x in events),
        "clock": "cupti",
    }
