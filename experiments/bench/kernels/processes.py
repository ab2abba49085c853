"""Attention of other frameworks, timed in processes of their own."""

import contextlib
import functools
from pathlib import Path

from experiments.bench.kernels.calls import MAX_ERROR, Budget, Implementation, Run
from experiments.bench.peer_process import PeerProcess, start
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


def everyone(
    python: Path | None, stack: contextlib.ExitStack, budget: Budget, num_calls: int
) -> tuple[list[Implementation], dict[str, str], dict[str, str]]:
    """Starts those that are installed.

    Args:
      python: the interpreter that has them; None starts nothing.
      stack: ends their processes.
      budget: of time; who has not answered when it is over is ended.
      num_calls: calls that they time.

    Returns:
      What there is to time; its versions; and why the others are not there.

    Raises:
      ValueError: the interpreter cannot be started.
    """
    found, absent = start(stack, PeerProcess, python, PEERS)
    ready = [
        Implementation(
            peer.name, True, functools.partial(_prepare, peer, budget, num_calls), SHARE
        )
        for peer in found
    ]
    return ready, {peer.name: peer.version for peer in found}, absent


def _prepare(
    peer: PeerProcess, budget: Budget, num_calls: int, problem: Problem
) -> Run:
    """Describes the problem to a peer, which draws its own numbers."""
    spec, kin = problem.spec, problem.ancestors
    asked = {
        "contexts": spec.contexts().tolist(),
        "rows": spec.rows,
        "shared": spec.shared,
        "heads": list(spec.heads),
        "page_size": spec.page_size,
        "dtype": spec.dtype,
        "ancestors": None,
        "num_turns": problem.num_turns,
        "num_calls": num_calls,
        "max_error": MAX_ERROR[spec.dtype],
    }
    if kin is not None:
        asked["ancestors"] = kin.reshape(spec.batch, spec.rows, spec.rows).tolist()
    said = peer.ask(asked, budget.left_s())
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
