"""Kernels of other frameworks, in separate processes, and the time budget."""

import collections
import contextlib
import time
from collections.abc import Generator
from pathlib import Path

from experiments.harness import MAX_ERROR, Implementation, KernelRun, PeerProcess
from pallas_kernels.bench import AttentionProblem, Timing

PEERS_FOLDER = Path(__file__).with_name("peers")
PEERS = {
    "torch SDPA": (PEERS_FOLDER / "sdpa.py", "Sdpa"),
    "torch cuDNN": (PEERS_FOLDER / "sdpa.py", "CuDnn"),
    "FlexAttention": (PEERS_FOLDER / "flex.py", "Flex"),
    "FlexAttention paged": (PEERS_FOLDER / "flex.py", "FlexPaged"),
    "FlashInfer": (PEERS_FOLDER / "flashinfer_peer.py", "FlashInfer"),
}
"""File and class of each peer, by name."""
PEER_MEMORY_SHARE = 0.1
"""Share of the total time for each peer: some compile for seconds per shape."""

now_s = time.monotonic
"""Clock; tests replace it."""


class TimeBudget:
    """Time budget for a benchmark, in total and in shares.

    Args:
      seconds: total time, above 0. No work is started after it; work in this process
        that has started runs to its end.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end_s = now_s() + seconds
        self._used_s = collections.defaultdict[str, float](float)

    def left_s(self) -> float:
        """Returns the remaining seconds for new work; at most 0 after the end."""
        return self._end_s - now_s()

    @contextlib.contextmanager
    def spend(self, name: str, share: float) -> Generator[None]:
        """Counts the time in the context towards the share of a name.

        Raises:
          ValueError: the share or the total time is used up.
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
    """Returns a ready peer as an implementation to time.

    Args:
      peer: process of `PEERS`.
      budget: time budget; a peer that exceeds it is ended.
      num_calls: number of timed calls.
    """

    def prepare(problem: AttentionProblem) -> KernelRun:
        spec = problem.spec
        kin = problem.ancestors
        if problem.v_pages is None:
            raise ValueError("it is not called over latent rows")
        trees = (spec.batch, spec.rows, spec.rows)
        # The peer draws its own numbers.
        question = {
            "contexts": spec.contexts().tolist(),
            "rows": spec.rows,
            "shared": spec.shared,
            "heads": list(spec.heads[:3]),
            "page_size": spec.page_size,
            "dtype": spec.dtype,
            "ancestors": None if kin is None else kin.reshape(trees).tolist(),
            "num_turns": problem.num_turns,
            "num_calls": num_calls,
            "max_error": MAX_ERROR[spec.dtype],
        }
        reply = peer.ask(question, budget.left_s())
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

    return Implementation(peer.name, True, prepare, PEER_MEMORY_SHARE)
