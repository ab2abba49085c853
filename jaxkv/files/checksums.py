"""SHA-256 digests of the files below a folder."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxkv import validation
from jaxkv.files.reading import reporting_errors

DIGESTS = "SHA256SUMS"
"""Name of the file with a folder's digests, in the format of `sha256sum -c`."""

_SEAL = b"# SHA-256 of the lines above: "


def digests(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the SHA-256 of every file below a folder, by relative path."""
    folder = validation.path("folder", folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in paths}


def check_digests(
    folder: str | os.PathLike[str], listed: Mapping[str, object], where: str
) -> None:
    """Compares the files below a folder with their digests.

    Args:
      folder: the folder.
      listed: expected digests, by relative path.
      where: name of the list in messages.

    Raises:
      ValueError: a file is damaged, missing or not listed; the message names the first.
    """
    folder = validation.path("folder", folder)
    actual = digests(folder)
    for name in [*listed, *actual]:
        if name not in actual:
            raise ValueError(f"{folder / name}: is missing")
        if name not in listed:
            raise ValueError(f"{folder / name}: is not listed in {where}")
        if actual[name] != listed[name]:
            raise ValueError(f"{folder / name}: is damaged")


def write_checksums(folder: Path, *, ignored: Sequence[str] = ()) -> None:
    """Writes `DIGESTS`, the SHA-256 list that `verify_checksums` reads.

    Args:
      folder: the folder.
      ignored: names of files that are not listed.
    """
    lines = [
        f"{digest}  {name}\n"
        for name, digest in digests(folder).items()
        if name not in ignored
    ]
    (folder / DIGESTS).write_bytes(_sealed("".join(lines).encode()))


def verify_checksums(folder: str | os.PathLike[str]) -> None:
    """Compares the files below a folder with the list that `write_checksums` wrote.

    Raises:
      ValueError: the list or a file is damaged or missing, or a file is not listed; the
        message names the first.
    """
    path = validation.path("folder", folder) / DIGESTS
    if not path.is_file():
        raise ValueError(f"{path}: is missing; it has the files' digests")
    list_digest = {DIGESTS: file_digest(path)}
    check_digests(folder, _read_list(path) | list_digest, DIGESTS)


def verify_listed(folder: str | os.PathLike[str], *names: str) -> None:
    """Compares files with the list that `write_checksums` wrote.

    A folder without a list, and files that are not listed, are accepted: a model comes
    from elsewhere, or gets more files.

    Args:
      folder: the folder.
      *names: the files to compare; without names, every listed file.

    Raises:
      ValueError: the list or a listed file is damaged or missing; the message names it.
    """
    folder = validation.path("folder", folder)
    path = folder / DIGESTS
    if not path.is_file():
        return
    remedy = f"delete {DIGESTS} if that is intended, to read the folder unchecked"
    try:
        listed = _read_list(path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    for name in listed.keys() & names if names else listed:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: is missing, but {DIGESTS} lists it; {remedy}")
        if file_digest(path) != listed[name]:
            raise ValueError(f"{path}: is damaged or was changed; {remedy}")


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file.

    Raises:
      ValueError: the file cannot be read.
    """
    with reporting_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_list(path: Path) -> dict[str, str]:
    """Returns the digests of a list by relative path, after checking its own."""
    with reporting_errors(path):
        data = path.read_bytes()
    lines = data.rpartition(_SEAL)[0]
    if data != _sealed(lines):
        raise ValueError(f"{path}: is damaged")
    pairs = (line.partition("  ") for line in lines.decode().split("\n")[:-1])
    return {name: digest for digest, _, name in pairs}


def _sealed(lines: bytes) -> bytes:
    """Appends the digest of the lines, so that damage to the list itself is found."""
    return lines + _SEAL + hashlib.sha256(lines).hexdigest().encode() + b"\n"
