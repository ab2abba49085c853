"""A table as a file has it: cells without interpretation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Cell = str | float | int | bool | None


class RawRow(NamedTuple):
    """A row of a file.

    Attributes:
      number: number of the row, from 1.
      line: number of the line on which the row begins, from 1; 0 in files without
        lines.
      cells: cells by column: JSON values, or the text of CSV cells.
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
      rows: the rows; a row may lack cells of some columns.
      notes: remarks of the reader, in sentences.
      repeated: names of several columns with different cells. These cells are not in
        the rows.
      doubtful: by column, a sentence about cells with two possible readings.
    """

    path: Path
    names: tuple[str, ...]
    rows: list[RawRow]
    notes: tuple[str, ...] = ()
    repeated: frozenset[str] = frozenset()
    doubtful: Mapping[str, str] = {}
