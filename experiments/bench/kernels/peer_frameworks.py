"""Implementations of other frameworks, in processes of their own, and their time."""

import collections
import contextlib
import time
from collections.abc import Generator
from pathlib import Path

from experiments.bench.peer_process import PeerProcess
from experiments.harness.kernels import MAX_ERROR, Implementation, KernelRun
from pallas_kernels.bench import Problem, Timing

FOLDER = Path(__file__).with_name("peers")
PEERS = {
    "torch SDPA": (FOLDER / "sdpa.py", "Sdpa"),
    "torch cuDNN": (FOLDER / "sdpa.py", "CuDnn"),
    "FlexAttention": (FOLDER / "flex.py", "Flex"),
    "FlexAttention paged": (FOLDER / "flex.py", "FlexPaged"),
    "FlashInfer": (FOLDER / "flashinfer_peer.py", "FlashInfer"),
}
"""Peers of other frameworks, in processes of their own: file and class by name."""
SHARE = 0.1
"""Of the time, for each: some compile for seconds a shape."""

now_s = time.monotonic
"""The clock; tests put another one in its place."""


class TimeBudget:
    """Seconds from now on, for all together and in shares.

    Args:
      seconds: what the whole may take, above 0. Nothing is begun after that; what has
        begun in this process ends when it ends.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end_s = now_s() + seconds
        self._used_s = collections.defaultdict[str, float](float)

    def left_s(self) -> float:
        """Seconds until nothing more is begun; not above 0 when the time is over."""
        return self._end_s - now_s()

    @contextlib.contextmanager
    def spend(self, name: str, share: float) -> Generator[None]:
        """Counts the time in the context as used by that name, of its share.

        Raises:
          ValueError: that share is over, or the whole time.
        """
        if self.left_s() <= 0:
            raise ValueError(f"skipped: the {self.seconds:g} s were over")
        if self._used_s[name] > (share_s := share * self.seconds):
            raise ValueError(f"skipped: its share of the time, {share_s:g} s, was over")
        start_s = now_s()
        try:
            yield
        finally:
            self._used_s[name] += now_s() - start_s


def wrap_peer(peer: PeerProcess, budget: TimeBudget, num_calls: int) -> Implementation:
    """A peer that is ready, as something to time.

    Args:
      peer: of `ELSEWHERE`.
      budget: time limit; a peer that has not answered by then is ended.
      num_calls: calls that it times.
    """

    def prepare(problem: Problem) -> KernelRun:
        spec, kin = problem.spec, problem.ancestors
        trees = (spec.batch, spec.rows, spec.rows)
        # The peer draws its own numbers.
        asked = {
            "contexts": spec.contexts().tolist(),
            "rows": spec.rows,
            "shared": spec.shared,
            "heads": list(spec.heads),
            "page_size": spec.page_size,
            "dtype": spec.dtype,
            "ancestors": None if kin is None else kin.reshape(trees).tolist(),
            "num_turns": problem.num_turns,
            "num_calls": num_calls,
            "max_error": MAX_ERROR[spec.dtype],
        }
        reply = peer.ask(asked, budget.left_s())
        if "refused" in reply:
            raise ValueError(reply["refused"])
        timing = dict.fromkeys(Timing._fields) | reply["timing"]
        return KernelRun(
            call=lambda index: None,
            error=lambda: reply["error"],
            measure=lambda: Timing(**timing),
            plan_s=reply["plan_s"],
            how=reply["how"],
        )

    return Implementation(peer.name, True, prepare, SHARE)
