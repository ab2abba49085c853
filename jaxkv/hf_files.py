"""Files of a folder that comes from elsewhere: read with blame, written aside.

Whatever goes wrong with a file becomes one ValueError line that names it, and a folder
that is written appears whole or not at all.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 2**28
"""Of a text: far more than any tokenizer takes."""


def read_text(path: Path) -> str:
    """Reads a text file of `MAX_CHARACTERS` at most."""
    with blaming(path), path.open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"holds over {MAX_CHARACTERS:,} characters")
        return text


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a file that holds one JSON object."""
    with blaming(path):
        value = json.loads(read_text(path))
        if not isinstance(value, dict):
            raise ValueError("must hold a JSON object")
        return value


@contextlib.contextmanager
def blaming(path: Path, *others: type[Exception]) -> Generator[None]:
    """Turns what goes wrong with a file into one ValueError line that names it.

    Args:
      path: the file to blame.
      *others: what a library raises, beside the errors of files and of values.
    """
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError, *others) as error:
        line = " ".join(str(error).split())
        if not line.startswith(str(path)):  # not blamed yet
            line = f"{path}: {line}"
        raise ValueError(line) from None


@contextlib.contextmanager
def aside(folder: Path) -> Generator[Path]:
    """Gives a new folder to fill, which then takes the place of `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
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
