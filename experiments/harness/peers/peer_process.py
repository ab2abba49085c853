"""Client side of `peer_main`: benchmark peers in separate processes."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from experiments import lab

MAIN = Path(__file__).with_name("peer_main.py")


class PeerProcess:
    """A peer in a separate process, as a context; leaving it ends the process.

    Args:
      name: name of the peer.
      python: interpreter that has its libraries.
      words: file, class, and arguments of the class; the number of threads, that of
        this process, is appended.
      limit_s: time limit until it is ready, in s.
      environ: additional environment variables.

    Raises:
      ValueError: the interpreter cannot be started.
    """

    version: str
    """Version of its libraries, known when it is ready."""

    def __init__(
        self,
        name: str,
        python: Path,
        *words: object,
        limit_s: float = threading.TIMEOUT_MAX,
        **environ: str,
    ):
        self.name = name
        self._start_limit_s = limit_s
        self._errors = tempfile.TemporaryFile("w+")
        try:
            self._process = subprocess.Popen(
                [*map(str, (python, MAIN, *words, lab.num_cpus()))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **environ},
                text=True,
                start_new_session=True,  # Ctrl-C goes to this process only
            )
        except OSError as error:
            self._errors.close()
            raise ValueError(f"{python}: cannot be started: {error.strerror}") from None

    def __enter__(self) -> Self:
        """Waits until the peer is ready.

        Raises:
          ValueError: its libraries are missing, or cannot be loaded.
        """
        try:
            with self._limit(self._start_limit_s):
                reply = self._hear()
            if "absent" in reply:
                raise ValueError(f"{self.name}: {reply['absent']}")
        except BaseException:
            self.__exit__()
            raise
        self.version = reply["version"]
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the process."""
        self._kill()
        self._process.communicate()
        self._errors.close()

    def ask(
        self, question: Mapping[str, object], limit_s: float = threading.TIMEOUT_MAX
    ) -> dict[str, Any]:
        """Sends a question, and waits for the answer.

        Args:
          question: JSON document.
          limit_s: time limit in s, after which the process is ended.

        Raises:
          ValueError: the peer failed, with its last error line; or the time limit was
            reached.
        """
        assert self._process.stdin is not None
        with self._limit(limit_s):
            with contextlib.suppress(BrokenPipeError):  # reported by the next read
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            return self._hear()

    @contextlib.contextmanager
    def _limit(self, limit_s: float) -> Generator[None]:
        """Ends the process if the work in the context exceeds a time limit."""
        timer = threading.Timer(limit_s, self._kill)
        timer.start()
        try:
            yield
        except ValueError:
            if timer.is_alive():
                raise
            raise ValueError(f"ended after {limit_s:.0f} s without an answer") from None
        finally:
            timer.cancel()

    def _kill(self) -> None:
        """Ends the process and its children, by their session."""
        # macOS permits no signal to a process that has ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        last = self._errors.read().strip().split("\n")[-1].strip()
        raise ValueError(f"{self.name}: ended early: {last or 'no error message'}")


def start_peers[P: PeerProcess](
    stack: contextlib.ExitStack,
    kind: type[P],
    python: Path | None,
    peers: Mapping[str, Sequence[object]],
    *,
    needed: bool = False,
) -> tuple[list[P], dict[str, str]]:
    """Starts the installed peers, and returns the reasons for the absent ones.

    Args:
      stack: exit stack that ends the peers.
      kind: class of the processes.
      python: interpreter that runs them; None starts no peer.
      peers: arguments of each peer, by name.
      needed: True if at least one peer is required.

    Raises:
      ValueError: the interpreter cannot be started, or a required peer is absent.
    """
    processes: list[P] = []
    absent: dict[str, str] = {}
    if python is None:
        return processes, absent
    # All peers load their libraries concurrently.
    for peer in [kind(name, python, *words) for name, words in peers.items()]:
        try:
            processes.append(stack.enter_context(peer))
        except ValueError as error:
            absent[peer.name] = str(error).removeprefix(f"{peer.name}: ")
    if needed and not processes:
        raise ValueError(f"{python}: no peer: {format_absent(absent)}")
    return processes, absent


def format_absent(absent: Mapping[str, str]) -> str:
    """Returns the absent peers with their reasons, as text."""
    return "; ".join(f"{name}: {why}" for name, why in absent.items())
