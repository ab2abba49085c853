"""Reading of text and JSON files, with errors of one line that name the file."""

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxkv import validation

MAX_CHARACTERS = 2**28
"""Largest text file in characters, far above the size of any tokenizer."""


def read_text(path: str | os.PathLike[str]) -> str:
    """Reads a text file of at most `MAX_CHARACTERS`."""
    path = validation.path("path", path)
    with reporting_errors(path), path.open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"holds over {MAX_CHARACTERS:,} characters")
        return text


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
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
