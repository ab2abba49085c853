"""Reads a file or pipe and decompresses it, with a limit on its size."""

import bz2
import gzip
import io
import lzma
import os
import select
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxkv.files import columnar

_UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""First bytes of a compression format -> its reader of a path or an open file."""
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)
"""Errors of damaged compressed data."""
_ZSTD = b"\x28\xb5\x2f\xfd"
_WRITER_WAIT_S = 5.0
"""Wait for the first bytes of a pipe; after it, a pipe without a writer is empty."""


def read_decompressed(path: Path, max_bytes: int) -> bytes:
    """Reads a regular file or a pipe, and decompresses gzip, bzip2, xz and zstd.

    Args:
      path: the file.
      max_bytes: limit on the size, compressed and decompressed.

    Raises:
      OSError: the file cannot be opened.
      ValueError: the file is a folder or a device, is too large, or is damaged.
    """
    # Without O_NONBLOCK, opening a pipe that has no writer blocks forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            kind = "a folder" if stat.S_ISDIR(mode) else "a device"
            raise ValueError(f"it is {kind}, not a file")
        if stat.S_ISFIFO(mode):
            # A read before the writer has opened the pipe would find it empty.
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(1000 * _WRITER_WAIT_S)
        os.set_blocking(descriptor, True)
        data = file.read(max_bytes + 1)
    try:
        for start, unpack in _UNPACKERS.items():
            if data.startswith(start):
                with unpack(io.BytesIO(data)) as file:
                    data = file.read(max_bytes + 1)
                break
        else:
            if data.startswith(_ZSTD):
                data = columnar.unpack_zstd(data, max_bytes)
    except DAMAGED as error:
        raise ValueError(str(error)) from None
    columnar.check_size(len(data), max_bytes)
    return data


def open_decompressed(path: Path) -> io.BufferedIOBase | None:
    """Opens a regular file for reading; gzip, bzip2 and xz are decompressed.

    Returns:
      The file, or None for other kinds of files and for zstd: those are read whole, by
      `read_decompressed`.

    Raises:
      OSError: the file cannot be opened.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(_ZSTD):
        return None
    for mark, unpack in _UNPACKERS.items():
        if start.startswith(mark):
            return unpack(path)
    return path.open("rb")
