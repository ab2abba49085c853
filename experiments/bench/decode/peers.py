"""Other engines, timed in processes of their own: `peer_script` seen from our side."""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

KINDS = ("transformers", "llama.cpp")
SCRIPT = Path(__file__).with_name("peer_script.py")


class Timing(NamedTuple):
    """One batch served once.

    Attributes:
      prefill_s: seconds until every request had its first token.
      decode_s: seconds that later tokens took.
      num_decoded: how many those were.
      tokens: the answers.
      peak_bytes: peak memory of the process that served it, weights included.
    """

    prefill_s: float
    decode_s: float
    num_decoded: int
    tokens: list[list[int]]
    peak_bytes: int


class Answerer:
    """A script in a process of its own, as a context; leaving it ends the process.

    It says `{"version": ...}` when it is ready, or `{"absent": why}`; then it answers
    every line, a JSON document, with another.

    Args:
      name: what it is called.
      python: the interpreter that runs it.
      words: the script, and its arguments.

    Raises:
      ValueError: the interpreter cannot be started.
    """

    def __init__(self, name: str, python: Path, words: Sequence[str]):
        command = [str(python), *words]
        self._errors = tempfile.TemporaryFile("w+")
        try:
            self._process = subprocess.Popen(
                command,
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

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Asks, and waits for the answer.

        Raises:
          ValueError: the script broke down; the line says what it said last.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is nothing to hear
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = ["", *self._errors.read().split("\n")]
            said = next(filter(str.strip, reversed(last)), "")
            raise ValueError(
                f"{self.name}: ended early: {said.strip() or 'it said nothing'}"
            )
        return json.loads(line)


class Peer(Answerer):
    """A running engine, as a context; leaving it ends the process.

    Args:
      kind: which engine, one of `KINDS`.
      python: the interpreter that has it installed.
      folder: the model, a Hugging Face folder of float32 weights.
      num_threads: processor threads that it may use.

    Raises:
      ValueError: the interpreter cannot be started.
    """

    def __init__(self, kind: str, python: Path, folder: Path, num_threads: int):
        words = [str(SCRIPT), kind, str(folder), str(num_threads)]
        super().__init__(kind, python, words)

    def measure(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Timing:
        """Serves prompts of one length as one batch, greedily.

        Raises:
          ValueError: the peer broke down; the line says what it said last.
        """
        asked = {"prompts": prompts, "output_tokens": output_tokens}
        return Timing(**self.ask(asked))


def start[P: contextlib.AbstractContextManager[Any]](
    stack: contextlib.ExitStack, python: Path, everyone: Iterable[P]
) -> tuple[list[P], list[str]]:
    """Starts those that are installed; says why the others are not there.

    Args:
      stack: which ends them.
      python: the interpreter that runs them.
      everyone: those to start.

    Raises:
      ValueError: none is there.
    """
    found, absent = [], []
    for peer in everyone:
        try:
            found.append(stack.enter_context(peer))
        except ValueError as error:
            absent.append(str(error))
    if not found:
        raise ValueError(f"{python}: no peer: {'; '.join(absent)}")
    return found, absent


def num_threads() -> int:
    """Processors that this process may use: what a peer gets, too."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
