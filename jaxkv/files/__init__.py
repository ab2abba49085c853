"""Files and folders: reading with one-line errors, and atomic writes.

An error of a file becomes a ValueError of one line that names the file. A file or
folder is written under a temporary name and renamed, so that it is complete or absent.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "ARRAY_OVERHEAD_BYTES",
    "DIGESTS",
    "MAX_CHARACTERS",
    "bundled_model",
    "bundled_models",
    "cache_folder",
    "check_digests",
    "check_disk_space",
    "check_replaceable",
    "digests",
    "folder_or_temporary",
    "model_folder",
    "parse_json",
    "parse_object",
    "read_json",
    "read_text",
    "replace_folder",
    "reporting_errors",
    "reporting_write_errors",
    "silencing_orbax",
    "system_reason",
    "tables",
    "verify_checksums",
    "write_atomically",
    "write_checksums",
]

MAX_CHARACTERS = 2**28
"""Largest text file in characters, far above the size of any tokenizer."""

ARRAY_OVERHEAD_BYTES = 2**20
"""Upper bound of the disk space of stored arrays in addition to their numbers, in
bytes."""

DIGESTS = "SHA256SUMS"
"""Name of the file with a folder's digests, in the format of `sha256sum -c`."""
_SEAL = b"# SHA-256 of the lines above: "


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the user's folder for compiled programs, which may be deleted any time.

    It is `jaxkv` in `$XDG_CACHE_HOME`, or in `~/.cache`.

    Args:
      environ: the environment variables.
    """
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxkv")


def bundled_models() -> dict[str, Path]:
    """Returns the folders of the models that ship with the project, by name.

    Draft heads, which have no architecture of their own, are left out. The folders are
    data of the package `experiments`: without that package the result is empty.
    """
    return {
        name: folder
        for name, folder in _bundled_folders().items()
        if "architectures" in json.loads((folder / "config.json").read_text("utf-8"))
    }


def bundled_model(name: str = "stdlib-bytes") -> Path:
    """Returns the folder of a model, or of draft heads, that ship with the project.

    The default is a byte-level Llama of 1.36 million parameters; its draft heads are
    `stdlib-bytes-eagle` and `stdlib-bytes-medusa`. A checkout of the repository also
    has `stdlib-bytes-deepseek`, a small model in the form of DeepSeek-V3.

    Args:
      name: name of the folder.

    Raises:
      ValueError: no such model is installed.
    """
    known = _bundled_folders()
    if name not in known:
        raise ValueError(
            f"name={name!r} must be one of: {', '.join(known) or '(none)'}"
        )
    return known[name]


def _bundled_folders() -> dict[str, Path]:
    """Returns all folders below `experiments/models`, by name.

    They are found by their place next to the package, not by an import of
    `experiments`: a user's own package of that name may precede it.
    """
    models = Path(__file__).parents[2] / "experiments" / "models"
    return {
        path.parent.name: path.parent for path in sorted(models.glob("*/config.json"))
    }


def model_folder(model: str | os.PathLike[str]) -> Path:
    """Returns the folder of a model.

    Args:
      model: the path of a Hugging Face folder, or the name of a bundled model. If both
        exist, the path has precedence.

    Raises:
      ValueError: neither exists. The message has the closest names, or the command that
        downloads a model from the Hugging Face Hub.
    """
    path, known = Path(model), bundled_models()
    if os.fspath(model) and path.is_dir():
        return path
    if not isinstance(model, str) or path.is_absolute():
        raise ValueError(f"{path}: no such folder")
    if model in known:
        return known[model]
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise ValueError(
            f"{model}: no such folder; if it is a model of the Hugging Face Hub, run "
            f"`hf download {model} --local-dir {path.name}` and give {path.name!r}"
        )
    near = difflib.get_close_matches(model, known, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"one of: {', '.join(known)}"
    )
    raise ValueError(f"unknown model {model!r}; {hint} (or the path of a folder)")


def read_text(path: str | Path) -> str:
    """Reads a text file of at most `MAX_CHARACTERS`."""
    with reporting_errors(path), Path(path).open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"holds over {MAX_CHARACTERS:,} characters")
        return text


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object."""
    return parse_object(read_text(path), path)


def parse_json(text: str, where: object) -> Any:
    """Parses a JSON document.

    Args:
      text: the document.
      where: name of the document in messages, such as its path or its line.

    Raises:
      ValueError: the text is not JSON; one line with `where`.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def parse_object(text: str, where: object) -> dict[str, Any]:
    """Parses a JSON document that is an object.

    Arguments and errors are those of `parse_json`.
    """
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: holds {type(value).__name__}, not an object")
    return value


@contextlib.contextmanager
def reporting_errors(path: str | Path, *errors: type[Exception]) -> Generator[None]:
    """Turns errors of a file into a ValueError of one line that names the file.

    Args:
      path: the file.
      *errors: exception types of a library, in addition to OSError, ValueError and
        RecursionError.
    """
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError, *errors) as error:
        line = " ".join(str(error).split())
        if not line.startswith(str(path)):  # the path is not named yet
            line = f"{path}: {line}"
        raise ValueError(line) from None


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
    path: Path, content: str | bytes | Callable[[BinaryIO], Any]
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


@contextlib.contextmanager
def folder_or_temporary(folder: str) -> Generator[Path]:
    """Yields `folder`, or for an empty name a temporary folder."""
    if folder:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
