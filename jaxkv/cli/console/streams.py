"""Standard output and error that may be closed, full, or without a reader.

A failure of standard error is ignored: a run of hours does not end because the disk of
its log is full. A failure of standard output ends the command with a one-line error.
Each warning is one line.
"""

import io
import os
import sys
import warnings
from collections.abc import Buffer, Callable
from typing import Any, TextIO

from jaxkv.cli import compilation_cache


class OutputError(Exception):
    """Standard output cannot be written.

    Attributes:
      is_left: True if the reader has closed the pipe, as `head` does.
    """

    def __init__(self, error: OSError):
        super().__init__(f"standard output: cannot be written: {error.strerror}")
        self.is_left = isinstance(error, BrokenPipeError)


def guard_streams(*, is_shared: bool = False) -> None:
    """Guards the streams of this process, and reopens streams that are closed.

    Args:
      is_shared: True if libraries such as Gloo print to standard output directly; their
        output goes to standard error.

    Raises:
      ValueError: standard output is closed.
    """
    is_closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # otherwise the next opened file gets this number
            os.open(os.devnull, os.O_RDWR)
    sys.stderr = _guarded(sys.stderr, 2, lambda error: None)
    if is_closed:
        raise ValueError("standard output is closed; send it to a file or /dev/null")
    number = 1
    if is_shared:
        number = os.dup(1)
        os.dup2(2, 1)
    sys.stdout = _guarded(sys.stdout, number, _refuse)
    hook: Any = _warn  # typeshed declares one specific function
    warnings.showwarning = hook


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning once, in one line."""
    text = compilation_cache.explain_cache_warning(" ".join(str(message).split()))
    if text and text not in _warned:
        _warned.add(text)
        print("jaxkv: warning:", text, file=sys.stderr)


_warned: set[str] = set()


def _refuse(error: OSError) -> None:
    raise OutputError(error)


def _guarded(
    before: TextIO | None, number: int, failed: Callable[[OSError], None]
) -> TextIO:
    """Returns the stream with a guard below its buffers."""
    is_file = isinstance(before, io.TextIOWrapper)
    # With PYTHONUNBUFFERED, Python's streams have no buffer in place of lines.
    return io.TextIOWrapper(
        io.BufferedWriter(_Guard(number, failed)),
        encoding=before.encoding if is_file else "utf-8",
        errors="replace",
        line_buffering=not is_file or before.line_buffering or before.write_through,
    )


class _Guard(io.FileIO):
    """A file that discards all output after its first failure.

    Args:
      number: file descriptor, which remains open.
      failed: called with the failure; may raise.
    """

    def __init__(self, number: int, failed: Callable[[OSError], None]):
        super().__init__(number, "w", closefd=False)
        self._failed = failed
        self._is_lost = False

    def write(self, data: Buffer, /) -> int:
        """Writes bytes; returns their number."""
        try:
            if not self._is_lost:
                return super().write(data)
        except OSError as error:
            self._is_lost = True
            self._failed(error)
        return memoryview(data).nbytes
