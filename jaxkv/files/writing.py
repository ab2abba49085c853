"""Atomic writes: a file or folder is complete or absent.

It is written under a temporary name, and renamed.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from jaxkv import validation

ARRAY_OVERHEAD_BYTES = 2**20
"""Upper bound of the disk space of stored arrays in addition to their numbers, in
bytes."""


def system_reason(error: Exception) -> str:
    """Returns the operating system's reason for an error, if the error has one.

    Libraries may have it in the text of the error.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    match = re.search(r": ([^:]*) \[os_error_code|: ([^:]*) \(os error", str(error))
    if match is not None:
        return match[1] or match[2]
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextlib.contextmanager
def silencing_orbax() -> Generator[None]:
    """Disables the logs of Orbax's threads, which repeat the errors that it raises."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, is_disabled in zip(loggers, before, strict=True):
            logger.disabled = is_disabled


@validation.checks_numbers(num_bytes=(0, 2**63))
def check_disk_space(folder: Path, num_bytes: int) -> None:
    """Raises an error if a disk lacks the space for arrays, before any are written.

    Without this check one of Orbax's threads fails and logs, while the remaining
    threads write on in a folder that is being deleted.

    Args:
      folder: where the arrays will be written.
      num_bytes: size of all arrays.

    Raises:
      OSError: the disk cannot hold a file of this size and `ARRAY_OVERHEAD_BYTES`.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes + ARRAY_OVERHEAD_BYTES)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


@contextlib.contextmanager
def reporting_write_errors(
    path: Path, *errors: type[Exception], comfort: str = ""
) -> Generator[None]:
    """Turns errors of writing a file or folder into a ValueError of one line.

    Args:
      path: the file or folder.
      *errors: exception types of a library, in addition to OSError.
      comfort: text after the reason.
    """
    try:
        yield
    except (OSError, *errors) as error:
        reason = system_reason(error)
        raise ValueError(f"{path}: cannot be written: {reason}{comfort}") from None


def write_atomically(
    path: Path, content: str | bytes | Callable[[BinaryIO], object]
) -> None:
    """Writes a file under a temporary name, and renames it.

    Args:
      path: path of the file, in an existing folder.
      content: the content, text as UTF-8; or a function that writes it to an open file.

    Raises:
      ValueError: the file cannot be written, in one line; an existing file is kept.
    """
    if path.exists() and not path.is_file():  # renaming would replace a device
        raise ValueError(f"{path}: cannot be written: it is no regular file")
    new = None
    try:
        with reporting_write_errors(path, UnicodeEncodeError):
            data = content.encode() if isinstance(content, str) else content
            handle, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "wb") as file:
                data(file) if callable(data) else file.write(data)
            os.chmod(new, 0o644)
            os.replace(new, path)
    except BaseException:
        if new is not None:
            Path(new).unlink(missing_ok=True)
        raise


def check_replaceable(folder: Path, header: str, kind: str, overwrite: bool) -> None:
    """Checks that a folder may be written: absent, empty, or of the same kind.

    Args:
      folder: path of the folder.
      header: name of a file that every such folder has.
      kind: kind of folder in messages, such as "model".
      overwrite: True if an existing folder of this kind may be replaced.

    Raises:
      ValueError: the folder exists and `overwrite` is False, or has no `header`.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{folder}: already exists; pass overwrite=True to replace it")
    if not (folder / header).is_file():
        raise ValueError(f"{folder}: holds no {kind}, so it is not overwritten")


@contextlib.contextmanager
def replace_folder(
    folder: Path, *errors: type[Exception], comfort: str = ""
) -> Generator[Path]:
    """Yields a new folder to fill, which replaces `folder` at the end.

    Args:
      folder: path of the result.
      *errors: exception types of a library for a full disk, in addition to OSError.
      comfort: end of the error's line, after the reason.

    Raises:
      ValueError: the folder cannot be written, in one line; an existing one is kept.
    """
    with reporting_write_errors(folder, *errors, comfort=comfort):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(folder) as new:
            yield new


@contextlib.contextmanager
def _replacing(folder: Path) -> Generator[Path]:
    """Yields a new folder; on success renames it to `folder`, else deletes it."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        yield new
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException:
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def folder_or_temporary(folder: str) -> Generator[Path]:
    """Yields `folder`, or for an empty name a temporary folder."""
    if folder:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
