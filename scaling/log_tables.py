"""Logs of training runs as they lie on disk: CSV with a header, JSON lines, a sweep.

Cells are left as they are written; `logs` says what they mean, and checks them.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RUNS = "runs.jsonl"
"""What a sweep's folder holds: a line for each run."""
CURVES = "curves.jsonl"
"""And, if it kept them, the training curves: a line for each report of a run."""

Cell = str | float | int | bool | None


class RawRow(NamedTuple):
    """A row of a file.

    Attributes:
      number: its place among the rows, from 1.
      line: the line of the file it begins on, from 1.
      cells: what stands in it by column; JSON values, or a CSV's text.
    """

    number: int
    line: int
    cells: Mapping[str, Cell]

    @property
    def place(self) -> str:
        """Where to look for it, such as "row 3 (line 4)"."""
        return f"row {self.number} (line {self.line})"


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
    """Reads a CSV with a header, or JSON lines, whichever it looks like.

    Args:
      path: the file. Cells of a CSV are parted by commas, or, where the header has
        none, by tabs or semicolons. Objects inside a line of JSON become columns
        `outer.inner`; lists are left out.

    Returns:
      The rows, at least one.

    Raises:
      ValueError: the file is not text, has no row, or a row is not like the others;
        one line that says which.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    table = _json_lines(path, text) if text.lstrip()[:1] == "{" else _csv(path, text)
    if not table.rows:
        raise ValueError(f"{path}: holds no runs")
    return table


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
    names = dict.fromkeys(name for row in rows for name in row.cells)
    return RawTable(path, tuple(names), rows, notes)


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Cell]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        elif not isinstance(inner, list):
            yield prefix + name, inner
