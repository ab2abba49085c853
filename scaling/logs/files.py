"""Logs of training runs as they lie on disk: CSV with a header, JSON, a sweep.

Cells are left as they are written; `columns` says what they mean, and checks them.
"""

import csv
import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RUNS = "runs.jsonl"
"""What a sweep's folder holds: a line for each run."""
CURVES = "curves.jsonl"
"""And, if it kept them, the training curves: a line for each report of a run."""

MAX_BYTES = 2**30
"""Of a log, unpacked; a million rows with a kilobyte each."""

_GZIP = b"\x1f\x8b"
_OTHERS = {
    b"PK\x03\x04": "a zip archive, as sheets and arrays of NumPy are",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x93NUMPY": "an array of NumPy",
    b"\x89HDF": "HDF5",
    b"SQLite format 3": "SQLite",
    b"\xff\xfe": "text in UTF-16, not UTF-8",
    b"\xfe\xff": "text in UTF-16, not UTF-8",
}
"""What files of other kinds begin with."""

Cell = str | float | int | bool | None


class RawRow(NamedTuple):
    """A row of a file.

    Attributes:
      number: its place among the rows, from 1.
      line: the line of the file it begins on, from 1; 0 where that says nothing.
      cells: what stands in it by column; JSON values, or a CSV's text.
    """

    number: int
    line: int
    cells: Mapping[str, Cell]

    @property
    def place(self) -> str:
        """Where to look for it, such as "row 3 (line 4)"."""
        line = f" (line {self.line})" if self.line else ""
        return f"row {self.number}{line}"


class RawTable(NamedTuple):
    """A file's rows.

    Attributes:
      path: the file.
      names: the columns, in the order in which they first appear.
      rows: the rows; one that lacks a column has no such cell.
      notes: what a reader was told in passing, in sentences.
    """

    path: Path
    names: tuple[str, ...]
    rows: list[RawRow]
    notes: tuple[str, ...] = ()


def read(path: Path) -> RawTable:
    """Reads a CSV with a header, JSON lines or a JSON array, whichever it looks like.

    Args:
      path: the file, gzipped or not, of at most `MAX_BYTES`. Cells of a CSV are parted
        by commas, or, where the header has none, by tabs or semicolons. Objects inside
        an object of JSON become columns `outer.inner`; lists are left out.

    Returns:
      The rows, at least one.

    Raises:
      ValueError: the file is a device or too large, is of another kind, has no row, or
        a row is not like the others; one line that says which.
    """
    text = read_text(path)
    start = next((mark for mark in text if not mark.isspace()), "")
    reader = {"{": _json_lines, "[": _json_array}.get(start, _csv)
    table = reader(path, text)
    if not table.rows:
        raise ValueError(f"{path}: holds no runs")
    if not table.names:
        raise ValueError(f"{path}: its rows hold neither numbers nor text")
    return table


def read_text(path: Path) -> str:
    """Reads a file or a pipe of text in UTF-8, gzipped or not.

    Raises:
      ValueError: it is something else, or of more than `MAX_BYTES`; one line.
    """
    try:
        data = _bytes(path)
        if data.startswith(_GZIP):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(
                f"more than {MAX_BYTES >> 20} MiB; leave columns or rows out"
            )
        for start, kind in _OTHERS.items():
            if data.startswith(start):
                raise ValueError(f"it is {kind}; CSV and JSON are read, gzipped or not")
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _bytes(path: Path) -> bytes:
    """Reads a file or a pipe, but no device, and no more than is of use."""
    # A pipe that nobody writes to would wait for ever to be opened.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            kind = "a folder" if stat.S_ISDIR(mode) else "a device"
            raise ValueError(f"it is {kind}, not a file")
        os.set_blocking(descriptor, True)
        return file.read(MAX_BYTES + 1)


def _csv(path: Path, text: str) -> RawTable:
    header = text.partition("\n")[0]
    marks = [mark for mark in ",\t;" if mark in header]
    lines = csv.reader(
        io.StringIO(text, newline=""), delimiter=marks[0] if marks else ",", strict=True
    )
    names: tuple[str, ...] = ()
    rows: list[RawRow] = []
    line = 0
    try:
        while True:
            line = lines.line_num + 1  # a quoted cell may run over several
            cells = next(lines, None)
            if cells is None:
                break
            if not any(cells):
                continue
            if not names:
                names = tuple(cell.strip() for cell in cells)
                if twice := {name for name in names if names.count(name) > 1}:
                    raise ValueError(f"{path}: two columns are named {min(twice)!r}")
                continue
            if len(cells) != len(names):
                raise ValueError(
                    f"{path}: row {len(rows) + 1} (line {line}) has {len(cells)} "
                    f"cells, the header has {len(names)}"
                )
            found = zip(names, (cell.strip() for cell in cells), strict=True)
            rows.append(RawRow(len(rows) + 1, line, dict(found)))
    except csv.Error as error:
        raise ValueError(f"{path}: line {line}: {error}") from None
    return RawTable(path, names, rows)


def _json_lines(path: Path, text: str) -> RawTable:
    rows: list[RawRow] = []
    notes: tuple[str, ...] = ()
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            cells = dict(_flat(value)) if isinstance(value, dict) else {}
        except ValueError as error:
            if not rows and _is_json(text):
                raise ValueError(
                    f"{path}: is one JSON object; a list of them is read, or one a line"
                ) from None
            if number == len(lines) and not text.endswith("\n"):
                # A program that was killed leaves half a line.
                notes = (f"the last line ({number}) is not whole, and is left out",)
                break
            raise ValueError(f"{path}: line {number}: not JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}: line {number}: nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}: line {number}: holds {type(value).__name__}, not an object"
            )
        rows.append(RawRow(len(rows) + 1, number, cells))
    return RawTable(path, _names(rows), rows, notes)


def _json_array(path: Path, text: str) -> RawTable:
    rows: list[RawRow] = []
    try:
        for number, value in enumerate(json.loads(text), 1):
            if not isinstance(value, dict):
                kind = type(value).__name__
                raise TypeError(f"row {number} is {kind}, not an object")
            rows.append(RawRow(number, 0, dict(_flat(value))))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    return RawTable(path, _names(rows), rows)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _names(rows: list[RawRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in row.cells))


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Cell]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        elif not isinstance(inner, list):
            yield prefix + name, inner
