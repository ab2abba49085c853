"""Common part of peers in torch: the shape, the reference, and the fastest variant.

A question is a shape as `Shape` accepts it, with `num_turns`, `num_calls` and
`max_error`. The answer is `{"error", "timing", "plan_s", "how"}`, or `{"refused":
reason}`. `error` is the relative error against attention in float64, at some rows;
results that are not below `max_error` are not timed. `how` is the fastest variant, and
`plan_s` the wall-clock time of its preparation per step; null without preparation.
"""

import abc
import statistics
import time

import torch

NUM_CHECKED_ROWS = 16
"""Last rows of a sequence that are compared with float64."""


class Shape:
    """Ragged rows after their contexts.

    Args:
      question: `contexts`, tokens before the rows of each sequence, the first `shared`
        of which are common to all; `rows` per sequence; `heads`: query heads, KV heads,
        head size; `page_size`; `dtype`; `ancestors`, the rows visible to each row
        including itself, [batch, rows, rows], or null for causal rows.
      device: device of the arrays.
    """

    def __init__(self, question, device):
        self.contexts = question["contexts"]
        self.rows = question["rows"]
        self.q_heads, self.kv_heads, self.head_dim = question["heads"]
        self.page_size = question["page_size"]
        self.shared = question["shared"]
        self.device = device
        self.dtype = getattr(torch, question["dtype"])
        self.batch = len(self.contexts)
        self.lengths = [context + self.rows for context in self.contexts]
        self.is_equal = len(set(self.contexts)) == 1
        self.is_tree = question["ancestors"] is not None
        ones = torch.ones(self.batch, self.rows, self.rows, dtype=torch.bool)
        kin = torch.tensor(question["ancestors"]) if self.is_tree else ones.tril()
        self.kin = kin.to(device)

    def random(self, *shape):
        """Returns normal random numbers."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def queries(self):
        """Returns queries: `[batch, q_heads, rows, head_dim]`."""
        return self.random(self.batch, self.q_heads, self.rows, self.head_dim)

    def attention_mask(self, i, length):
        """Returns the mask of visible positions of sequence i: `[rows, length]`."""
        context = self.contexts[i]
        place = torch.arange(length, device=self.device)
        mask = (place < context).repeat(self.rows, 1)
        mask[:, context : context + self.rows] = self.kin[i]
        return mask

    def tables(self, *, may_share):
        """Returns the pages of each sequence in random order, and the number of pages.

        Args:
          may_share: True if all sequences share the pages of the common prefix.
        """
        num_shared = self.shared // self.page_size if may_share else 0
        page_counts = [
            -(-length // self.page_size) - num_shared for length in self.lengths
        ]
        prefix, *suffixes = torch.randperm(num_shared + sum(page_counts)).split(
            [num_shared, *page_counts]
        )
        tables = [[*prefix.tolist(), *pages.tolist()] for pages in suffixes]
        return tables, num_shared + sum(page_counts)

    def error(self, q, keys, out):
        """Returns the error of the last rows of the first and the longest sequence.

        Args:
          q: queries.
          keys: returns keys and values of KV head 0 of sequence i, `[length,
            head_dim]`.
          out: result, in the shape of q.
        """
        group = self.q_heads // self.kv_heads
        rows = slice(max(0, self.rows - NUM_CHECKED_ROWS), None)
        off = norm = 0.0
        for i in (0, self.lengths.index(max(self.lengths))):
            length = self.lengths[i]
            k, v = (x[:length].double() for x in keys(i))
            scores = q[i, :group, rows].double() @ k.T / self.head_dim**0.5
            hidden = ~self.attention_mask(i, length)[rows]
            wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
            off += float(((out[i, :group, rows].double() - wanted) ** 2).sum())
            norm += float((wanted**2).sum())
        return (off / norm) ** 0.5


class TorchPeer(abc.ABC):
    """Base class of peers.

    Raises:
      ValueError: the peer needs a GPU, and there is none.
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
        """Draws the arrays of a turn, too large to be cached until the next turn.

        Returns queries, `[batch, q_heads, rows, head_dim]`; `keys` for `Shape.error`;
        and further arguments of its calls.
        """

    @abc.abstractmethod
    def ways(self, shape, turns):
        """Yields the variants of its attention.

        Each is a name; a call for each turn, whose output has the shape of the queries;
        and the seconds of the preparation for a step, or None.
        """

    def answer(self, question):
        """Checks every variant and times the correct ones."""
        torch.manual_seed(0)
        try:
            return self._best(Shape(question, self.device), question)
        except Exception as error:  # of any kind: the next shapes run
            message = " ".join(str(error).split())[:200]
            refusal = isinstance(error, ValueError)
            return {
                "refused": message if refusal else f"{type(error).__name__}: {message}"
            }
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()  # for the other processes

    def _best(self, shape, question):
        turns = [self.draw(shape) for _ in range(question["num_turns"])]
        answers = []
        refusals = []
        q, keys, *_ = turns[0]
        for how, calls, plan_s in self.ways(shape, turns):
            try:
                error = shape.error(q, keys, calls[0]())
                if not error <= question["max_error"]:
                    raise RuntimeError(f"incorrect result: error={error:.2g}")
                timing = measure_calls(calls, question["num_calls"], self.device)
            except RuntimeError as error:  # unsupported shapes, out of memory
                message = " ".join(str(error).split())[:120]
                refusals.append(f"{how}: {message}" if how else message)
                continue
            answers.append(dict(error=error, timing=timing, plan_s=plan_s, how=how))
        if not answers:
            raise ValueError("; ".join(refusals))
        return min(answers, key=lambda answer: answer["timing"]["seconds"])


def time_work(work, device):
    """Runs work twice; returns the seconds of the second run, and the result."""
    for _ in range(2):
        start = time.perf_counter()
        done = work()
        if device == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - start, done


def measure_calls(calls, num_calls, device):
    """Times calls in turns, as `pallas_kernels.bench.timing` does."""
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
    last = len(seconds) - 1
    middle = statistics.median(seconds)
    low = seconds[round(0.1 * last)]
    high = seconds[round(0.9 * last)]
    return {"seconds": middle, "spread": (high - low) / middle, "clock": "wall"}


def _profile(turns):
    """Sums the times of the kernels from the profiler; means, without a spread."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in turns:
            call()
        torch.cuda.synchronize()
    events = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    if not events:
        raise RuntimeError("the profiler recorded no kernel")
    return {
        "seconds": sum(x.self_device_time_total for x in events) / 1e6 / len(turns),
        "num_kernels": round(sum(x.count for x in events) / len(turns)),
        # For a kernel with several launches per call: the time of one launch.
        "longest_s": max(x.self_device_time_total / 1e6 / x.count for x in events),
        "clock": "cupti",
    }
