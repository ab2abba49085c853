"""Logs of training runs on disk: a table, or the folder of a sweep."""

import math
import os
from pathlib import Path

from jaxkv.files import Cell as Cell
from jaxkv.files import RaggedError, read_decompressed_text, read_table
from jaxkv.files import RawRow as RawRow
from jaxkv.files import RawTable as RawTable
from scaling.logs import rules

RUNS = "runs.jsonl"
"""File of a sweep's folder with a line for each run."""
CURVES = "curves.jsonl"
"""File of a sweep's folder with a line for each report of a run; may be missing."""

MAX_FILE_BYTES = 2**30
"""Size limit of an unpacked log; a million rows with a kilobyte each."""


def read_log_table(path: Path) -> RawTable:
    """Reads a table (`jaxkv.files.tables`) with at least one row and column.

    Raises:
      ValueError: the file cannot be read, has no row, or has a ragged row; one line
        with the file and the row.
    """
    try:
        table = read_table(path, max_bytes=MAX_FILE_BYTES)
    except RaggedError as error:
        raise ValueError(f"{path}: {error}") from None
    if not table.rows:
        raise ValueError(f"{path}: holds no runs")
    if not table.names:
        raise ValueError(f"{path}: its rows hold neither numbers nor text")
    return table


def read_log_text(path: str | os.PathLike[str]) -> str:
    """Reads text of at most `MAX_FILE_BYTES`; see `tables.read_decompressed_text`."""
    return read_decompressed_text(path, max_bytes=MAX_FILE_BYTES)


def read_number(
    table: RawTable,
    row: RawRow,
    name: str,
    low: float = 0.0,
    *,
    is_open: bool = True,
    hint: str = "",
) -> float:
    """Reads a finite number of a row, above `low`, or at least `low` if not `is_open`.

    Args:
      table: the table.
      row: a row of it.
      name: the column.
      low: lower end of the range.
      is_open: False includes the lower end.
      hint: text after the message about the range.

    Raises:
      ValueError: the cell is missing, no number, or outside its range.
    """
    cell = row.cells.get(name)
    where = f"{table.path}: {row.place}: {name}"
    if cell is None or str(cell).strip() == "":
        raise ValueError(f"{where} is missing")
    value = rules.parse_number(cell, 1.0)
    if value is None or not math.isfinite(value):
        raise ValueError(f"{where}={cell!r} must be a finite number")
    if value < low or (is_open and value == low):
        bracket = "(" if is_open else "["
        raise ValueError(f"{where}={value:g} must be in {bracket}{low:g}, inf){hint}")
    return value
