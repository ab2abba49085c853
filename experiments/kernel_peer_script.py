"""Times attention of another framework. Run by an interpreter that has it.

    python kernel_peer_script.py NAME NUM_THREADS

Stands alone: it imports nothing of the project, and runs on older Pythons. On standard
output it says `{"version"}` when it is ready, or `{"absent": why}`. Then it answers
every line `{"contexts", "rows", "heads", "dtype", "is_tree", "num_turns", "num_calls"}`
with `{"error", "timing"}`, or `{"refused": why}`. Sequence i has contexts[i] tokens
before its rows; heads are query heads, KV heads and their size. `error` is the norm of
the difference to attention in float64 at some rows by the norm of that; `timing` is
null for no calls.
"""

import json
import os
import statistics
import sys
import time


class Sdpa:
    """torch's scaled_dot_product_attention, on contiguous keys and values.

    On a GPU with the backend that is fastest, cuDNN's among them.
    """

    def __init__(self, num_threads):
        import torch
        import torch.nn.attention.bias

        torch.set_num_threads(num_threads)
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.version = torch.__version__

    def answer(self, asked):
        """Checks, and times if there are calls to time."""
        torch = self._torch
        torch.manual_seed(0)
        turns = [self._draw(asked) for _ in range(asked["num_turns"])]
        error = self._error(asked, *turns[0], self._call(asked, *turns[0]))
        if not asked["num_calls"]:
            return {"error": error, "timing": None}
        timings = []
        for backend in self._backends():
            try:
                with torch.nn.attention.sdpa_kernel(backend):
                    timings.append(self._time(asked, turns))
            except RuntimeError:
                continue  # it does not take these shapes
        best = min(timings, key=lambda timing: timing["seconds"])
        return {"error": error, "timing": best}

    def _backends(self):
        backend = self._torch.nn.attention.SDPBackend
        if self._device == "cpu":
            return [[backend.FLASH_ATTENTION, backend.MATH]]
        names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        return [[getattr(backend, name)] for name in names]

    def _draw(self, asked):
        torch, (q_heads, kv_heads, head_dim) = self._torch, asked["heads"]
        contexts, rows = asked["contexts"], asked["rows"]
        batch, length = len(contexts), max(contexts) + rows
        like = {"dtype": getattr(torch, asked["dtype"]), "device": self._device}
        q = torch.randn(batch, q_heads, rows, head_dim, **like)
        k, v = (
            torch.randn(batch, kv_heads, length, head_dim, **like) for _ in range(2)
        )
        mask, is_causal = None, False
        equal = len(set(contexts)) == 1
        if equal and not asked["is_tree"] and rows > 1:
            is_causal = contexts[0] == 0
            if not is_causal:
                # Rows stand at the end: the fast backends know this one.
                bias = torch.nn.attention.bias
                mask = bias.causal_lower_right(rows, length)
        elif not equal or asked["is_tree"]:
            mask = self._seen(asked, length)[:, None]
        return q, k, v, mask, is_causal

    def _seen(self, asked, length):
        """Which places each row sees: `[batch, rows, length]`."""
        torch, contexts, rows = self._torch, asked["contexts"], asked["rows"]
        seen = torch.zeros(len(contexts), rows, length, dtype=torch.bool)
        for i, context in enumerate(contexts):
            seen[i, :, :context] = True
            kin = torch.zeros(rows, rows, dtype=torch.bool)
            for row in range(rows):
                # The parent is a row before it, the last one outside of trees.
                if row and asked["is_tree"]:
                    kin[row] = kin[int(torch.randint(0, row, ()))]
                elif row:
                    kin[row] = kin[row - 1]
                kin[row, row] = True
            seen[i, :, context : context + rows] = kin
        return seen.to(self._device)

    def _call(self, asked, q, k, v, mask, is_causal):
        attend = self._torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, mask, is_causal=is_causal, enable_gqa=True)

    def _error(self, asked, q, k, v, mask, is_causal, out):
        """Holds the first and the longest sequence, and their last rows, to float64."""
        torch, contexts = self._torch, asked["contexts"]
        group, length = q.shape[1] // k.shape[1], k.shape[2]
        off = norm = 0.0
        for i in (0, contexts.index(max(contexts))):
            rows = slice(max(0, asked["rows"] - 16), None)
            queries = q[i, :group, rows].double()
            scores = queries @ k[i, 0].double().T / q.shape[3] ** 0.5
            if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
                seen = mask[i, 0, rows]
            else:
                place = torch.arange(length, device=q.device)
                row = torch.arange(asked["rows"], device=q.device)[rows]
                seen = place[None, :] <= contexts[i] + row[:, None]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            wanted = weights @ v[i, 0].double()
            off += float(((out[i, :group, rows].double() - wanted) ** 2).sum())
            norm += float((wanted**2).sum())
        return (off / norm) ** 0.5

    def _time(self, asked, turns):
        num_calls = asked["num_calls"]

        def call(index):
            return self._call(asked, *turns[index % len(turns)])

        call(0)
        if self._device == "cuda":
            return self._profile(call, num_calls)
        seconds = []
        for index in range(1, 1 + num_calls):
            start = time.perf_counter()
            call(index)
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > 1:
                break
        seconds.sort()
        last, middle = len(seconds) - 1, statistics.median(seconds)
        low, high = seconds[round(0.1 * last)], seconds[round(0.9 * last)]
        spread = (high - low) / middle
        return {
            "seconds": middle,
            "spread": spread,
            "num_kernels": None,
            "clock": "wall",
        }

    def _profile(self, call, num_calls):
        """Sums the times of the kernels, as ours are; a mean, without a spread."""
        torch = self._torch
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for index in range(1, 1 + num_calls):
                call(index)
            torch.cuda.synchronize()
        events = [x for x in profile.key_averages() if x.self_device_time_total > 0]
        seconds = sum(x.self_device_time_total for x in events) / 1e6 / num_calls
        return {
            "seconds": seconds,
            "spread": None,
            "num_kernels": round(sum(x.count for x in events) / num_calls),
            "clock": "cupti",
        }


PEERS = {"torch SDPA": Sdpa}


def main(name, num_threads):
    """Answers until the input ends."""
    # What libraries print goes to standard error: the answers stand alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        peer = PEERS[name](int(num_threads))
    except ImportError as error:
        say({"absent": " ".join(str(error).split())})
        return
    say({"version": peer.version})
    for line in sys.stdin:
        try:
            say(peer.answer(json.loads(line)))
        except (RuntimeError, ValueError) as error:
            say({"refused": " ".join(str(error).split())[:200]})


if __name__ == "__main__":
    # The folder of this script holds modules with common names; none is for us.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    main(*sys.argv[1:])
