"""Logs of training runs on disk: a table, or the folder of a sweep."""

import os
from pathlib import Path

from jaxkv.files import Cell as Cell
from jaxkv.files import RaggedError, read_decompressed_text, read_table
from jaxkv.files import RawRow as RawRow
from jaxkv.files import RawTable as RawTable

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
