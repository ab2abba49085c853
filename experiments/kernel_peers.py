"""Attention of other frameworks, timed in processes of their own."""

import contextlib
import os
from pathlib import Path
from typing import Any

from experiments import peers
from experiments.kernel_runs import Implementation, Run
from pallas_kernels.benchmarking import Timing
from pallas_kernels.problems import Problem

KINDS = ("torch SDPA",)
"""What the script knows; another one is a class there and a name here."""
SCRIPT = Path(__file__).with_name("kernel_peer_script.py")


def start(
    python: Path | None, stack: contextlib.ExitStack
) -> tuple[list[Implementation], dict[str, str], dict[str, str]]:
    """Starts those that are installed.

    Args:
      python: the interpreter that has them; None starts nothing.
      stack: ends their processes.

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
    for kind in KINDS:
        peer = peers.Answerer(kind, python, [str(SCRIPT), kind, num_threads])
        try:
            stack.enter_context(peer)
        except ValueError as error:
            absent[kind] = str(error)
        else:
            prepare = lambda problem, peer=peer: _prepare(problem, peer)  # noqa: E731
            versions[kind] = peer.version
            found.append(Implementation(kind, True, prepare))
    return found, versions, absent


def _prepare(problem: Problem, peer: peers.Answerer) -> Run:
    """Describes the problem to a peer, which draws its own numbers."""
    spec = problem.spec
    asked: dict[str, Any] = {
        "contexts": spec.contexts().tolist(),
        "rows": spec.rows,
        "heads": list(spec.heads),
        "dtype": spec.dtype,
        "is_tree": spec.kind == "tree",
        "num_turns": problem.num_turns,
    }

    def answer(num_calls: int) -> dict[str, Any]:
        said = peer.ask(asked | {"num_calls": num_calls})
        if "refused" in said:
            raise ValueError(said["refused"])
        return said

    def measure(num_calls: int) -> Timing:
        return Timing(**answer(num_calls)["timing"])

    return Run(lambda index: None, lambda: answer(0)["error"], measure)
