"""Bytes of a file or pipe, unpacked, with a limit on their number."""

import bz2
import gzip
import io
import lzma
import os
import stat
import zlib
from pathlib import Path
from typing import Any

from jaxkv.files import columnar

_GZIP, _BZIP2, _XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"
_ZSTD = b"\x28\xb5\x2f\xfd"


def read(path: Path, max_bytes: int) -> bytes:
    """Reads a regular file or a pipe, and unpacks gzip, bzip2, xz and zstd.

    Args:
      path: the file.
      max_bytes: limit on the size, packed and unpacked.

    Raises:
      OSError: the file cannot be opened.
      ValueError: the file is a folder or a device, is too large, or is damaged.
    """
    data = _read(path, max_bytes)
    try:
        if data.startswith(_GZIP):
            data = _limited(gzip.GzipFile(fileobj=io.BytesIO(data)), max_bytes)
        elif data.startswith(_BZIP2):
            data = _limited(bz2.BZ2File(io.BytesIO(data)), max_bytes)
        elif data.startswith(_XZ):
            data = _limited(lzma.LZMAFile(io.BytesIO(data)), max_bytes)
        elif data.startswith(_ZSTD):
            data = columnar.unpack_zstd(data, max_bytes)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(str(error)) from None
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes >> 20} MiB; leave columns or rows out")
    return data


def _limited(file: Any, max_bytes: int) -> bytes:
    with file:
        return file.read(max_bytes + 1)


def _read(path: Path, max_bytes: int) -> bytes:
    # Opening a pipe without a writer blocks forever unless told otherwise.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            kind = "a folder" if stat.S_ISDIR(mode) else "a device"
            raise ValueError(f"it is {kind}, not a file")
        os.set_blocking(descriptor, True)
        return file.read(max_bytes + 1)
