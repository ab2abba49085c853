"""SHA-256 digests of the files below a folder."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from jaxkv.files.reading import reporting_errors

DIGESTS = "SHA256SUMS"
"""Name of the file with a folder's digests, in the format of `sha256sum -c`."""

_SEAL = b"# SHA-256 of the lines above: "


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below a folder, by relative path."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with reporting_errors(path), path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.relative_to(folder).as_posix()] = digest
    return found


def check_digests(folder: Path, listed: Mapping[str, object], where: str) -> None:
    """Compares the files below a folder with their digests.

    Args:
      folder: the folder.
      listed: expected digests, by relative path.
      where: name of the list in messages.

    Raises:
      ValueError: a file is damaged, missing or not listed; the message names the first.
    """
    found = digests(folder)
    for name in [*listed, *found]:
        if name not in found:
            raise ValueError(f"{folder / name}: is missing")
        if name not in listed:
            raise ValueError(f"{folder / name}: is not listed in {where}")
        if found[name] != listed[name]:
            raise ValueError(f"{folder / name}: is damaged")


def write_checksums(folder: Path) -> None:
    """Writes `DIGESTS`, the SHA-256 list that `verify_checksums` reads."""
    lines = [f"{digest}  {name}\n" for name, digest in digests(folder).items()]
    (folder / DIGESTS).write_bytes(_sealed("".join(lines).encode()))


def verify_checksums(folder: Path) -> None:
    """Compares the files below a folder with the list that `write_checksums` wrote.

    Raises:
      ValueError: the list or a file is damaged or missing, or a file is not listed; the
        message names the first.
    """
    path = folder / DIGESTS
    if not path.is_file():
        raise ValueError(f"{path}: is missing; it has the files' digests")
    with reporting_errors(path):
        data = path.read_bytes()
    lines = data.rpartition(_SEAL)[0]
    if data != _sealed(lines):
        raise ValueError(f"{path}: is damaged")
    pairs = (line.partition("  ") for line in lines.decode().split("\n")[:-1])
    own = {DIGESTS: hashlib.sha256(data).hexdigest()}
    listed = {name: digest for digest, _, name in pairs}
    check_digests(folder, listed | own, DIGESTS)


def _sealed(lines: bytes) -> bytes:
    """Appends the digest of the lines, so that damage to the list itself is found."""
    return lines + _SEAL + hashlib.sha256(lines).hexdigest().encode() + b"\n"
