"""One writer per folder: a lock that ends with its process, however that ends."""

import contextlib
import errno
import fcntl
import os
import socket
import warnings
from pathlib import Path
from typing import IO

from jaxkv import files

NAME = ".lock"
"""The file in the folder that the system's lock is on; it says who has it."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class WriterLock:
    """Takes a folder until `close`, making it where it is missing.

    A file that a killed process left behind holds nobody up: the lock is the system's,
    and went with the process. On a file system without locks a warning says so.

    Args:
      folder: the folder.

    Raises:
      ValueError: another process writes there, or this one does already; or the folder
        cannot be written.
    """

    def __init__(self, folder: Path):
        self._path = Path(folder).absolute() / NAME
        with files.reporting_write_errors(folder):
            self._file = self._take(folder)

    def close(self) -> None:
        """Lets another process in."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            if self._is_current(self._file):
                self._path.unlink()
        self._file.close()

    def _take(self, folder: Path) -> IO[str]:
        while True:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", encoding="utf-8")
            try:
                _lock(file, folder)
                if self._is_current(file):
                    file.truncate(0)
                    file.write(f"{os.getpid()} {socket.gethostname()}\n")
                    file.flush()
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # who had it deleted it in between: once more

    def _is_current(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False


def _lock(file: IO[str], folder: Path) -> None:
    """Locks the file at once or not at all."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        number, _, host = file.read().strip().partition(" ")
        who = "another process"
        if number.isdigit():  # else it is just about to write its number
            elsewhere = f" on {host}" if host != socket.gethostname() else ""
            who = f"process {number}{elsewhere}"
        raise ValueError(f"{folder}: {who} is writing here; one at a time") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{folder}: its file system has no locks; nothing keeps a second process "
            "from writing here",
            stacklevel=2,
        )
