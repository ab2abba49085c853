"""Reads a file or pipe and decompresses it, with a limit on its size."""

import bz2
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxkv.files import columnar

_UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda packed: gzip.GzipFile(fileobj=packed),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
"""First bytes of a compression format -> its reader."""
_ZSTD = b"\x28\xb5\x2f\xfd"


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
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(str(error)) from None
    columnar.check_size(len(data), max_bytes)
    return data
