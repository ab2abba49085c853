"""A lock for one writer per folder, released when its process ends in any way."""

import contextlib
import errno
import fcntl
import os
import socket
import warnings
from pathlib import Path
from typing import IO

from jaxkv import files

LOCK_FILE = ".lock"
"""Name of the locked file in the folder; it holds the writer's process id and host."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class WriterLock:
    """Exclusive right to write to a folder until `close`; creates a missing folder.

    A lock file that a killed process left does not block: the lock is the operating
    system's, and ended with the process. On a file system without locks there is a
    warning instead.

    Args:
      folder: the folder.

    Raises:
      ValueError: this or another process holds the lock, or the folder is not
        writable.
    """

    def __init__(self, folder: Path):
        self._path = Path(folder).absolute() / LOCK_FILE
        with files.reporting_write_errors(folder):
            self._file = self._take(folder)

    def close(self) -> None:
        """Releases the lock."""
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
            file.close()  # deleted by its previous holder in between: try again

    def _is_current(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False


def _lock(file: IO[str], folder: Path) -> None:
    """Locks a file without waiting."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        number, _, host = file.read().strip().partition(" ")
        who = "another process"
        if number.isdigit():  # else the holder has not written its number yet
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
