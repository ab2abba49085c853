"""Attention of other frameworks, timed in processes of their own."""

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from experiments.bench.decode import peers
from experiments.bench.kernels.budget import Budget
from experiments.bench.kernels.calls import MAX_ERROR, Implementation, Run
from experiments.bench.kernels.peers import peer_script
from pallas_kernels.bench import Problem, Timing

SCRIPT = Path(__file__).with_name("peer_script.py")


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
    found: list[Implementation] = []
    versions: dict[str, str] = {}
    absent: dict[str, str] = {}
    num_threads = str(len(os.sched_getaffinity(0)))
    if python is None:
        return found, versions, absent
    # All begin to load their libraries before the first is waited for.
    for peer in [
        _Peer(name, python, [str(SCRIPT), name, num_threads])
        for name in peer_script.PEERS
    ]:
        name = peer.name
        try:
            stack.enter_context(peer)
        except ValueError as error:
            absent[name] = str(error).removeprefix(f"{name}: ")
        else:
            versions[name] = peer.version

            def prepare(problem: Problem, peer: _Peer = peer) -> Run:
                return _prepare(problem, peer, budget, num_calls)

            found.append(Implementation(name, True, prepare, has_share=True))
    return found, versions, absent


class _Peer(peers.Answerer):
    """A peer that is ended if it takes too long."""

    def ask_for(self, asked: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Asks, and waits so many seconds at most.

        Raises:
          ValueError: it broke down, or was ended.
        """
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            return self.ask(asked)
        except ValueError:
            if timer.is_alive():
                raise
            raise ValueError(f"ended after {limit_s:.0f} s without an answer") from None
        finally:
            timer.cancel()


def _prepare(problem: Problem, peer: _Peer, budget: Budget, num_calls: int) -> Run:
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
    said = peer.ask_for(asked, budget.left_s())
    if "refused" in said:
        raise ValueError(said["refused"])
    return Run(
        call=lambda index: None,
        error=lambda: said["error"],
        measure=lambda: Timing(**said["timing"]),
        plan_s=said["plan_s"],
        how=said["how"],
    )
