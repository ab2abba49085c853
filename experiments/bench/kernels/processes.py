"""Attention of other frameworks, timed in processes of their own."""

from pathlib import Path
from typing import Any

from experiments.bench.kernels.calls import MAX_ERROR, Budget, Implementation, Run
from experiments.bench.peer_process import PeerProcess
from pallas_kernels.bench import Problem, Timing

FOLDER = Path(__file__).with_name("peers")
PEERS = {
    "torch SDPA": (FOLDER / "sdpa.py", "Sdpa"),
    "torch cuDNN": (FOLDER / "sdpa.py", "CuDnn"),
    "FlexAttention": (FOLDER / "flex.py", "Flex"),
    "FlexAttention paged": (FOLDER / "flex.py", "FlexPaged"),
    "FlashInfer": (FOLDER / "flashinfer_peer.py", "FlashInfer"),
}
"""File and class by name."""
SHARE = 0.1
"""Of the time, for each: some compile for seconds a shape."""


def implementation(peer: PeerProcess, budget: Budget, num_calls: int) -> Implementation:
    """A peer that is ready, as something to time.

    Args:
      peer: of `PEERS`.
      budget: of time; who has not answered when it is over is ended.
      num_calls: calls that it times.
    """

    def prepare(problem: Problem) -> Run:
        said = peer.ask(_question(problem, num_calls), budget.left_s())
        if "refused" in said:
            raise ValueError(said["refused"])
        timing = dict.fromkeys(Timing._fields) | said["timing"]
        return Run(
            call=lambda index: None,
            error=lambda: said["error"],
            measure=lambda: Timing(**timing),
            plan_s=said["plan_s"],
            how=said["how"],
        )

    return Implementation(peer.name, True, prepare, SHARE)


def _question(problem: Problem, num_calls: int) -> dict[str, Any]:
    """Describes a problem to a peer, which draws its own numbers."""
    spec, kin = problem.spec, problem.ancestors
    trees = (spec.batch, spec.rows, spec.rows)
    return {
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
