"""Reads large tables in blocks of rows.

The memory does not grow with the number of rows for CSV and JSON lines, compressed by
gzip, bzip2 or xz or not. Other files are read whole, by `read_table`, with its limit on
their size: JSON arrays, Parquet, Arrow, NumPy, zstd, pipes, and CSV with decimal commas
or with two columns of one name. The delimiter of a CSV is chosen from its first block.
"""

import functools
import io
import itertools
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv import validation
from jaxkv.files import columnar, decompression, tables
from jaxkv.files.delimited import DelimitedReader, RaggedError

BLOCK_BYTES = 2**22
"""Size of a block in bytes."""
_ROW_BYTES = 2**8
"""Bytes of a row of CSV, for the number of rows in a block."""
_MAX_LINE = 2**28
"""Longest line in characters."""
MISSING: object = object()
"""Cell of a row that lacks the column."""


class TableBlock(NamedTuple):
    """Consecutive rows of a table, by column."""

    lines: Sequence[int]
    """Number of the line on which each row begins, from 1; in files without lines, the
    number of the row."""
    columns: Mapping[str, Sequence[object]]
    """Cells by column: JSON values, or the text of CSV cells; `MISSING` where a row
    has none."""
    repeated: frozenset[str] = frozenset()
    """Names of several columns with different cells, which are not in `columns`."""
    doubtful: Mapping[str, str] = {}
    """By column, a sentence about cells with two possible readings."""


@validation.checks_numbers(block_bytes=validation.SIZES)
def read_blocks(
    path: str | os.PathLike[str], *, block_bytes: int = BLOCK_BYTES
) -> Iterator[TableBlock]:
    """Reads a table in blocks of rows; the format is detected by its first bytes.

    Args:
      path: a table in a format of `read_table`; cells that are lists are kept, and
        objects inside JSON objects are one cell or several columns.
      block_bytes: size of a block; a smaller file is one block.

    Yields:
      The blocks; at least one, which may have no rows.

    Raises:
      RaggedError: a row of a CSV has another number of cells than its header.
      ValueError: the file cannot be read; one line with the file and the position.
    """
    path = validation.path("path", path)
    head = _read_head(path, block_bytes)
    start = (head or b"").lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if start == b"[":
        head = None
    reader = None
    if head is not None and start != b"{":
        sample = head[: head.rfind(b"\n") + 1].decode("utf-8-sig", errors="replace")
        reader = DelimitedReader(sample)
        names = next(iter(reader), (0, []))[1]
        if reader.has_commas or len({*names}) < len(names):
            head = None
    if head is None:
        table = tables.read_table(path, keep_lists=True, allow_partial=False)
        yield TableBlock(
            [row.line or row.number for row in table.rows],
            {x: [row.cells.get(x, MISSING) for row in table.rows] for x in table.names},
            table.repeated,
            table.doubtful,
        )
    elif reader is None:
        yield from _object_blocks(path, block_bytes)
    else:
        yield from _delimited_blocks(path, sample, -(-block_bytes // _ROW_BYTES))


def iterate_objects(
    path: str | os.PathLike[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads JSON objects one after the other: JSON lines, an array, or one object.

    Yields:
      The line of each object, or its number in an array, and the object.

    Raises:
      ValueError: the file cannot be read, or an entry is not an object; one line.
    """
    path = validation.path("path", path)
    head = _read_head(path, BLOCK_BYTES, is_whole=True)
    if head is not None and head.lstrip().startswith(b"{"):
        lines = _read_lines(path, newline="\n")
        first = next(((n, line) for n, line in lines if line.strip()), (0, ""))
        try:
            json.loads(first[1])
        except (ValueError, RecursionError):
            lines.close()
        else:
            for number, line in itertools.chain([first], lines):
                if line.strip():
                    yield number, tables.parse_json_line(path, number, line)
            return
    try:
        values = json.loads(tables.read_decompressed_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    for number, value in enumerate([values] if isinstance(values, dict) else values, 1):
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise ValueError(f"{path}: entry {number}: holds {kind}, not an object")
        yield number, value


@validation.checks_numbers(num_bytes=validation.SIZES)
def read_head(path: str | os.PathLike[str], num_bytes: int = 2**16) -> bytes:
    """Returns the first bytes of a file, decompressed; none of a pipe or zstd.

    Raises:
      ValueError: the file cannot be read; one line with the file.
    """
    path = validation.path("path", path)
    with tables.reading_table(path):
        file = decompression.open_decompressed(path)
        if file is None:
            return b""
        with file:
            try:
                return file.read(num_bytes)
            except decompression.DAMAGED:
                return b""  # the reader of the table has the message


def _read_head(path: Path, num_bytes: int, *, is_whole: bool = False) -> bytes | None:
    """Returns the first bytes of a text; None if the file must be read whole.

    With `is_whole`, smaller files have a head as well.
    """
    head = read_head(path, num_bytes)
    is_short = len(head) < num_bytes and not is_whole
    other = columnar.detect_format(head) or tables.detect_unsupported(head)
    return (
        None
        if not head or is_short or other or (b"\n" not in head and not is_whole)
        else head
    )


def _read_lines(path: Path, newline: str) -> Generator[tuple[int, str]]:
    """Yields numbers and lines of a text; `newline` is that of `io.TextIOWrapper`."""
    with tables.reading_table(path):
        file = decompression.open_decompressed(path)
        if file is None:
            raise ValueError("it is no longer a file")
        packed: Any = file
        with io.TextIOWrapper(packed, "utf-8-sig", newline=newline) as text:
            read = functools.partial(text.readline, _MAX_LINE)
            try:
                for number, line in enumerate(iter(read, ""), 1):
                    if len(line) == _MAX_LINE:
                        raise ValueError(f"line {number} has {_MAX_LINE:,} characters")
                    yield number, line
            except decompression.DAMAGED as error:
                raise ValueError(str(error)) from None


def _object_blocks(path: Path, block_chars: int) -> Iterator[TableBlock]:
    rows: list[dict[str, object]] = []
    numbers: list[int] = []
    size = 0

    def block() -> TableBlock:
        names = dict.fromkeys(itertools.chain.from_iterable(rows))
        columns = {x: [row.get(x, MISSING) for row in rows] for x in names}
        return TableBlock([*numbers], columns)

    for number, line in _read_lines(path, newline="\n"):
        if not line.strip():
            continue
        rows.append(tables.parse_json_line(path, number, line))
        numbers.append(number)
        size += len(line)
        if size >= block_chars:
            yield block()
            rows = []
            numbers = []
            size = 0
    yield block()


def _delimited_blocks(path: Path, sample: str, block_rows: int) -> Iterator[TableBlock]:
    lines = (line for _, line in _read_lines(path, newline=""))
    reader = iter(DelimitedReader(sample, lines))
    names = next(reader, (0, []))[1]
    num_rows = 0
    while True:
        try:
            batch = [*itertools.islice(reader, block_rows)]
        except ValueError as error:
            named = str(error).startswith(str(path))
            raise ValueError(error if named else f"{path}: {error}") from None
        for row, (line, cells) in enumerate(batch, num_rows + 1):
            if len(cells) != len(names):
                raise RaggedError(row, line, len(cells), len(names))
        columns = zip(*(cells for _, cells in batch), strict=True)
        empty = {name: () for name in names}
        yield TableBlock(
            [line for line, _ in batch],
            empty | dict(zip(names, columns, strict=False)),
        )
        num_rows += len(batch)
        if len(batch) < block_rows:
            return
