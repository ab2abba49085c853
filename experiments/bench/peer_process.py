"""Peers of a benchmark in processes of their own: `peer_main` seen from our side."""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

MAIN = Path(__file__).with_name("peer_main.py")


class PeerProcess:
    """A peer in a process of its own, as a context; leaving it ends the process.

    Args:
      name: what it is called.
      python: the interpreter that has its libraries.
      words: the file it lies in, its class, and what that is made of.

    Raises:
      ValueError: the interpreter cannot be started.
    """

    def __init__(self, name: str, python: Path, *words: Any):
        self._errors = tempfile.TemporaryFile("w+")
        try:
            self._process = subprocess.Popen(
                [str(python), str(MAIN), *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,  # a Ctrl-C is for us to hear
            )
        except OSError as error:
            self._errors.close()
            raise ValueError(f"{python}: cannot be started: {error.strerror}") from None
        self.name = name

    def __enter__(self) -> Self:
        """Waits until it is ready.

        Raises:
          ValueError: what it needs is not installed there, or cannot be loaded.
        """
        try:
            said = self._hear()
            if "absent" in said:
                raise ValueError(f"{self.name}: {said['absent']}")
        except BaseException:
            self.__exit__()
            raise
        self.version: str = said["version"]
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, asked: dict[str, Any], limit_s: float | None = None) -> Any:
        """Asks, and waits for the answer.

        Args:
          asked: a JSON document.
          limit_s: seconds after which the process is ended; None means never.

        Raises:
          ValueError: it broke down, and the line says what it said last; or was ended.
        """
        assert self._process.stdin is not None
        timer = threading.Timer(limit_s or 0.0, self._process.kill)
        if limit_s is not None:
            timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # then there is nothing to hear
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
            return self._hear()
        except ValueError:
            if limit_s is None or timer.is_alive():
                raise
            raise ValueError(f"ended after {limit_s:.0f} s without an answer") from None
        finally:
            timer.cancel()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = ["", *self._errors.read().split("\n")]
            said = next(filter(str.strip, reversed(last)), "").strip()
            raise ValueError(f"{self.name}: ended early: {said or 'it said nothing'}")
        return json.loads(line)


def start[P: PeerProcess](
    stack: contextlib.ExitStack, everyone: Iterable[P]
) -> tuple[list[P], dict[str, str]]:
    """Starts those that are installed, and says by name why the others are not there.

    Args:
      stack: which ends them.
      everyone: those to start.

    Raises:
      ValueError: their interpreter cannot be started.
    """
    found, absent = [], {}
    for peer in everyone:
        try:
            found.append(stack.enter_context(peer))
        except ValueError as error:
            absent[peer.name] = str(error).removeprefix(f"{peer.name}: ")
    return found, absent


def start_some[P: PeerProcess](
    stack: contextlib.ExitStack, python: Path, everyone: Iterable[P]
) -> tuple[list[P], str]:
    """Starts those that are installed, and says in a line why others are not there.

    Args:
      stack: which ends them.
      python: the interpreter that runs them.
      everyone: those to start.

    Raises:
      ValueError: none is there.
    """
    found, absent = start(stack, everyone)
    line = "; ".join(f"{name}: {why}" for name, why in absent.items())
    if not found:
        raise ValueError(f"{python}: no peer: {line}")
    return found, line


def num_threads() -> int:
    """Processors that this process may use: what a peer gets, too."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
