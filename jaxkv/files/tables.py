"""Reads tables from CSV, JSON, Parquet, Arrow and NumPy files, compressed or not.

Cells keep the values of the file; callers interpret and check the columns.
"""

import contextlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxkv import validation
from jaxkv.files import columnar, decompression, delimited
from jaxkv.files.delimited import RaggedError as RaggedError
from jaxkv.files.raw_table import Cell as Cell
from jaxkv.files.raw_table import RawRow as RawRow
from jaxkv.files.raw_table import RawTable as RawTable

MAX_FILE_BYTES = 2**30
"""Default limit on a file's decompressed size, in bytes."""

_FOREIGN = {
    b"\x89HDF": "HDF5",
    b"SQLite format 3": "SQLite",
    b"\xff\xfe": "text in UTF-16, not UTF-8",
    b"\xfe\xff": "text in UTF-16, not UTF-8",
}
"""First bytes of unsupported formats."""


@validation.checks_numbers(max_bytes=validation.SIZES)
def read_table(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_FILE_BYTES,
    keep_lists: bool = False,
    allow_partial: bool = True,
) -> RawTable:
    """Reads a table; the format is detected by its first bytes.

    Args:
      path: a CSV with a header (`delimited`), JSON lines, a JSON array of objects,
        Parquet, Arrow, Feather, or .npz with a vector for each column; each may be
        compressed by gzip, bzip2, xz or zstd. Objects inside JSON objects become
        columns `outer.inner`. Parquet, Arrow, Feather and zstd need pyarrow.
      max_bytes: limit on the size, compressed and decompressed.
      keep_lists: True keeps cells that are lists; False drops them.
      allow_partial: True drops an incomplete last JSON line, with a note.

    Raises:
      RaggedError: a row of a CSV has another number of cells than its header.
      ValueError: the file cannot be read; one line with the file and the position.
    """
    path = validation.path("path", path)
    with reading_table(path):
        data = decompression.read_decompressed(path, max_bytes)
        if columnar.detect_format(data):
            column_table = columnar.read_columns(data, max_bytes)
            columns = [
                (name, column)
                for name, column in column_table.values
                if keep_lists or not any(isinstance(x, list) for x in column)
            ]
            names = [name for name, _ in columns]
            cells = zip(*(column for _, column in columns), strict=True)
            return _table(path, names, ((0, row) for row in cells), column_table.notes)
        text = _decode(data)
    start = next((mark for mark in text if not mark.isspace()), "")
    if start == "{":
        rows, notes = _json_lines(path, text, keep_lists, allow_partial)
    elif start == "[":
        rows = _json_array(path, text, keep_lists)
        notes = ()
    else:
        try:
            csv = delimited.read_delimited(text)
        except RaggedError:
            raise
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        table = _table(path, csv.names, csv.rows, csv.notes)
        return table._replace(doubtful=csv.doubtful)
    names = tuple(dict.fromkeys(name for row in rows for name in row.cells))
    return RawTable(path, names, rows, notes)


@validation.checks_numbers(max_bytes=validation.SIZES)
def read_decompressed_text(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_FILE_BYTES
) -> str:
    """Reads UTF-8 text, compressed or not, with or without a byte order mark.

    Raises:
      ValueError: the file has another format, or is larger than `max_bytes`; one line.
    """
    path = validation.path("path", path)
    with reading_table(path):
        data = decompression.read_decompressed(path, max_bytes)
        if kind := columnar.detect_format(data):
            raise ValueError(f"it is {kind}, not text")
        return _decode(data)


@contextlib.contextmanager
def reading_table(path: Path) -> Generator[None]:
    """Turns errors of a file into a ValueError of one line that names the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _decode(data: bytes) -> str:
    if kind := detect_unsupported(data):
        raise ValueError(f"it is {kind}")
    return data.decode("utf-8-sig")


def detect_unsupported(data: bytes) -> str:
    """Returns the unsupported format of data by its first bytes, or an empty text."""
    kinds = (kind for start, kind in _FOREIGN.items() if data.startswith(start))
    return next(kinds, "")


def _table(
    path: Path,
    header: Iterable[str],
    lines: Iterable[tuple[int, Sequence[object]]],
    notes: tuple[str, ...] = (),
) -> RawTable:
    """Makes the rows, and drops columns of one name with different cells."""
    names = [*header]
    lines = [*lines]
    repeated = {name for name in names if names.count(name) > 1}
    for name in [*repeated]:
        places = [i for i, other_name in enumerate(names) if other_name == name]
        if all(len({cells[i] for i in places}) == 1 for _, cells in lines):
            repeated.discard(name)
    columns = [(i, name) for i, name in enumerate(names) if name not in repeated]
    rows = [
        RawRow(number, line, {name: cells[i] for i, name in columns})
        for number, (line, cells) in enumerate(lines, 1)
    ]
    unique = tuple(dict.fromkeys(name for _, name in columns))
    return RawTable(path, unique, rows, notes, frozenset(repeated))


def _json_lines(
    path: Path, text: str, keep_lists: bool, allow_partial: bool
) -> tuple[list[RawRow], tuple[str, ...]]:
    rows: list[RawRow] = []
    # Strings may hold U+2028 and U+0085, at which `splitlines` splits.
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = parse_json_line(path, number, line)
        except ValueError:
            if not rows and _is_json(text):
                raise ValueError(
                    f"{path}: is one JSON object; a list of them is read, or one a line"
                ) from None
            is_cut = number == len(lines) and not text.endswith("\n")
            if is_cut and allow_partial and not _is_json(line):
                # The program that wrote it was killed.
                note = f"the last line ({number}) is incomplete and is left out"
                return rows, (note,)
            raise
        cells = dict(_flat(value, keep_lists))
        rows.append(RawRow(len(rows) + 1, number, cells))
    return rows, ()


def parse_json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    """Parses a line that holds a JSON object.

    Raises:
      ValueError: it does not; one line with the file and the number of the line.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number}: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: line {number}: nested too deeply") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"{path}: line {number}: holds {kind}, not an object")
    return value


def _json_array(path: Path, text: str, keep_lists: bool) -> list[RawRow]:
    rows: list[RawRow] = []
    try:
        for number, value in enumerate(json.loads(text), 1):
            if not isinstance(value, dict):
                kind = type(value).__name__
                raise TypeError(f"row {number} is {kind}, not an object")
            rows.append(RawRow(number, 0, dict(_flat(value, keep_lists))))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    return rows


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _flat(
    value: dict[str, object], keep_lists: bool, prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, keep_lists, f"{prefix}{name}.")
        elif keep_lists or not isinstance(inner, list):
            yield prefix + name, inner
