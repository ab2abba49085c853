"""Attention of other frameworks, timed in processes of their own."""

import contextlib
import functools
from pathlib import Path
from typing import Any

from experiments.bench import peer_process
from experiments.bench.kernels.calls import MAX_ERROR, Budget, Implementation, Run
from pallas_kernels.bench import Problem, Timing

FOLDER = Path(__file__).with_name("peers")
PEERS = {
    "torch SDPA": ("sdpa.py", "Sdpa"),
    "torch cuDNN": ("sdpa.py", "CuDnn"),
    "FlexAttention": ("flex.py", "Flex"),
    "FlexAttention paged": ("flex.py", "FlexPaged"),
    "FlashInfer": ("flashinfer_peer.py", "FlashInfer"),
}
"""File and class by name."""


def start(
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
    if python is None:
        return [], {}, {}
    # All begin to load their libraries before the first is waited for.
    threads = peer_process.num_threads()
    everyone = [
        peer_process.PeerProcess(name, python, FOLDER / file, kind, threads)
        for name, (file, kind) in PEERS.items()
    ]
    found, absent = peer_process.start(stack, everyone)
    ready = []
    for peer in found:
        prepare = functools.partial(_prepare, peer, budget, num_calls)
        ready.append(Implementation(peer.name, True, prepare, has_share=True))
    return ready, {peer.name: peer.version for peer in found}, absent


def _prepare(
    peer: peer_process.PeerProcess, budget: Budget, num_calls: int, problem: Problem
) -> Run:
    """Describes the problem to a peer, which draws its own numbers."""
    spec = problem.spec
    asked: dict[str, Any] = {
        "contexts": spec.contexts().tolist(),
        "rows": spec.rows,
        "shared": spec.shared,
        "heads": list(spec.heads),
        "page_size": spec.page_size,
        "dtype": spec.dtype,
        "is_tree": spec.kind == "tree",
        "num_turns": problem.num_turns,
        "num_calls": num_calls,
        "max_error": MAX_ERROR[spec.dtype],
    }
    said = peer.ask(asked, budget.left_s())
    if "refused" in said:
        raise ValueError(said["refused"])
    return Run(
        call=lambda index: None,
        error=lambda: said["error"],
        measure=lambda: Timing(**said["timing"]),
        plan_s=said["plan_s"],
        how=said["how"],
    )
