"""Rows of a table as the file has them, before any column has a meaning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Cell = str | float | int | bool | None


class RawRow(NamedTuple):
    """A row of a file.

    Attributes:
      number: position among the rows, from 1.
      line: line of the file on which the row begins, from 1; 0 for files without lines.
      cells: values by column; JSON values, or the text of a CSV cell.
    """

    number: int
    line: int
    cells: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Position for error messages, such as "row 3 (line 4)"."""
        line = f" (line {self.line})" if self.line else ""
        return f"row {self.number}{line}"


class RawTable(NamedTuple):
    """The rows of a file.

    Attributes:
      path: the file.
      names: the columns, in order of first appearance.
      rows: the rows; a row that lacks a column has no such cell.
      notes: remarks of the reader, in sentences.
      repeated: names that several columns with different cells share. Their cells are
        not in the rows.
      doubtful: by column, a sentence about cells that can be read in two ways.
    """

    path: Path
    names: tuple[str, ...]
    rows: list[RawRow]
    notes: tuple[str, ...] = ()
    repeated: frozenset[str] = frozenset()
    doubtful: Mapping[str, str] = {}
