"""Reads delimited text: CSV and its variants.

The delimiter is the one of comma, tab, semicolon and pipe that gives every row the same
number of cells; a first line `sep=;`, as Excel writes it, sets it. Lines that begin
with # are comments. Decimal commas become points where they cannot be thousands
separators.
"""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_DELIMITERS = ",\t;|"
_SEP = re.compile(r'\s*"?sep=(.)\1*"?\1*\s*', re.IGNORECASE)
_MAX_SAMPLE = 200
"""Rows in which numeric columns are counted to choose the delimiter."""

_SUFFIX = r"(?:[eE][-+]?\d+)?\s*[KMBGTkmbgt]?"
_DECIMAL = re.compile(rf"[-+]?(?:\d+|\d{{1,3}}(?:\.\d{{3}})+),\d+{_SUFFIX}")
_THOUSANDS = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?:,\d{{3}})+(?:\.\d+)?{_SUFFIX}")
_DOTTED = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?:\.\d{{3}})+{_SUFFIX}")
_NUMBER_TEXT = re.compile(rf"[-+]?(?:\d+[.,]?\d*|[.,]\d+){_SUFFIX}")


class Delimited(NamedTuple):
    """A table of text cells.

    Attributes:
      names: cells of the header.
      rows: for each row the number of its first line, and as many cells as `names`.
      notes: remarks, in sentences.
      doubtful: by column, a sentence about numbers with two possible readings.
    """

    names: list[str]
    rows: list[tuple[int, list[str]]]
    notes: tuple[str, ...]
    doubtful: Mapping[str, str]


class RaggedError(ValueError):
    """A row has more or fewer cells than the header.

    Attributes:
      row: number of the row, from 1.
      line: number of its first line.
      num_cells: number of its cells.
      num_names: number of cells of the header.
    """

    def __init__(self, row: int, line: int, num_cells: int, num_names: int) -> None:
        super().__init__(
            f"row {row} (line {line}) has {num_cells} cells, the header has {num_names}"
        )
        self.row = row
        self.line = line
        self.num_cells = num_cells
        self.num_names = num_names


def read_delimited(text: str) -> Delimited:
    """Reads text with a header.

    Raises:
      RaggedError: a row has another number of cells than the header.
      ValueError: a quoted cell has no end, or text follows the end of one.
    """
    reader = DelimitedReader(text)
    names: list[str] = []
    rows: list[tuple[int, list[str]]] = []
    for line, cells in reader:
        if not names:
            names = cells
        elif len(cells) != len(names):
            raise RaggedError(len(rows) + 1, line, len(cells), len(names))
        else:
            rows.append((line, cells))
    doubtful: dict[str, str] = {}
    if reader.has_commas:
        doubtful = _read_commas(names, rows, reader.delimiter)
    notes: tuple[str, ...] = ()
    if comments := reader.comments:
        lines = "comment line" if len(comments) == 1 else "comment lines"
        more = ", ..." if len(comments) > 3 else ""
        line_numbers = ", ".join(map(str, comments[:3])) + more
        notes = (f"{len(comments)} {lines} left out (line {line_numbers})",)
    return Delimited(names, rows, notes, doubtful)


class DelimitedReader:
    """Iterates over records, header first; skips blank lines and comments.

    Attributes:
      delimiter: the delimiter.
      has_commas: True if cells of the sample may have commas, which are decimal or
        separate thousands.
      comments: line numbers of the comments skipped so far.
    """

    def __init__(
        self,
        sample: str,
        lines: Iterable[str] | None = None,
        delimiter: str | None = None,
    ) -> None:
        """Makes the reader.

        Args:
          sample: the text, or its first lines, from which the delimiter is chosen.
          lines: all lines of the text; None means that the sample is the text.
          delimiter: the delimiter; None chooses it.
        """
        self.comments: list[int] = []
        self._sample = sample
        self._source = lines
        self._num_skipped = 0
        if delimiter is None:
            match = _SEP.fullmatch(sample.partition("\n")[0].rstrip("\r"))
            self._num_skipped = 1 if match else 0
            delimiter = match[1] if match else _choose_delimiter(sample)
        self.delimiter = delimiter
        # In plain CSV a comma inside a cell needs quotes.
        self.has_commas = "," in sample and (delimiter != "," or '"' in sample)
        self._format: dict[str, Any] = {
            "delimiter": delimiter,
            "strict": True,
            "skipinitialspace": True,
        }
        self._is_first_line = True  # of a record
        self._line = 0
        self._has_header = False
        self._labels: bool | None = None
        self._last_comment = ""

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        records = csv.reader(self._lines(), **self._format)
        while True:
            self._is_first_line = True
            try:
                cells = next(records, None)
            except csv.Error as error:
                raise ValueError(f"line {self._line}: {error}") from None
            if cells is None:
                break
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            line = self._line
            if self._has_header:
                self._labels = self._labels or False
            elif header := self._commented_header(cells):
                self._labels = False
                yield self.comments.pop(), header
            self._has_header = True
            yield line, cells
        if not self._has_header and (header := self._commented_header([])):
            yield self.comments.pop(), header

    def _lines(self) -> Iterator[str]:
        lines = self._source
        if lines is None:
            lines = io.StringIO(self._sample, newline="")
        for number, line in enumerate(lines, 1):
            if number <= self._num_skipped:
                continue
            if self._is_first_line:
                self._line = number
                if "#" in line and line.lstrip()[0] == "#":
                    # A # may begin every row, as in a column of issue numbers.
                    if self._labels is None and self._has_header:
                        remaining_lines = io.StringIO(self._sample, newline="")
                        remaining_lines = filter(
                            str.strip, itertools.islice(remaining_lines, number, None)
                        )
                        self._labels = all(
                            x.lstrip()[0] == "#" for x in remaining_lines
                        )
                    if not self._labels:
                        self._last_comment = line
                        self.comments.append(number)
                        continue
            self._is_first_line = False
            yield line

    def _commented_header(self, first: list[str]) -> list[str]:
        """Returns the cells of the comment above the first row if it is a header."""
        if not self._last_comment:
            return []
        try:
            cells = next(
                csv.reader([self._last_comment.lstrip("# \t")], **self._format)
            )
        except (csv.Error, StopIteration):
            return []
        cells = [cell.strip() for cell in cells]
        is_header = len(cells) > 1 and not any(map(_NUMBER_TEXT.fullmatch, cells))
        if first:
            is_header &= len(cells) == len(first)
            is_header &= any(map(_NUMBER_TEXT.fullmatch, first))
        return cells if is_header else []


def _choose_delimiter(text: str) -> str:
    """Returns the best delimiter of those in the header, or a comma."""
    heads: list[str] = []
    for line in filter(None, map(str.strip, io.StringIO(text, newline=""))):
        heads = [*heads[-1:], line]
        if not line.startswith("#"):
            break
    delimiters = [mark for mark in _DELIMITERS if any(mark in line for line in heads)]
    if len(delimiters) > 1:
        return max(delimiters, key=lambda mark: _rate(text, mark))
    return delimiters[0] if delimiters else ","


def _rate(text: str, delimiter: str) -> tuple[bool, float, int, int]:
    """Returns a sort key for a delimiter; a greater key is a better delimiter.

    The better delimiter gives more rows the number of cells of the header, which must
    be above 1; then more numeric columns; then more cells.
    """
    num_names = 0
    num_rows = 0
    num_same = 0
    is_number: list[bool] = []
    try:
        for _, cells in DelimitedReader(text, delimiter=delimiter):
            if not num_names:
                num_names = len(cells)
                is_number = [True] * num_names
                continue
            num_rows += 1
            num_same += len(cells) == num_names
            if num_rows <= _MAX_SAMPLE:
                pairs = zip(is_number, cells, strict=False)
                is_number = [x and bool(_NUMBER_TEXT.fullmatch(y)) for x, y in pairs]
            elif num_same < num_rows:
                break
    except ValueError:
        num_same = 0
    if num_names < 2:
        return False, 0.0, 0, 0
    share = num_same / max(num_rows, 1)
    return num_same == num_rows, share, sum(is_number), num_names


def _read_commas(
    names: list[str], rows: list[tuple[int, list[str]]], delimiter: str
) -> dict[str, str]:
    """Rewrites numbers with commas in place, in columns where all cells can be read.

    A comma is a decimal comma or separates thousands. If each cell of a column allows
    both readings, the column is read like the unambiguous columns; without such
    columns, the comma is decimal unless the delimiter is a comma.

    Returns:
      The columns that may be misread, with a sentence for each.
    """
    kinds: dict[int, str] = {}
    for place in range(len(names)):
        cells = {cells[place] for _, cells in rows if "," in cells[place]}
        decimal = {cell for cell in cells if _DECIMAL.fullmatch(cell)}
        thousands = {cell for cell in cells if _THOUSANDS.fullmatch(cell)}
        if cells and cells <= decimal | thousands:
            is_decimal = bool(cells - thousands)
            is_thousands = bool(cells - decimal)
            if not (is_decimal and is_thousands):
                kinds[place] = (
                    "decimal" if is_decimal else "thousands" if is_thousands else ""
                )
    sure = {kind for kind in kinds.values() if kind}
    usual = sure.pop() if len(sure) == 1 else ""
    doubtful = {}
    for place, name in enumerate(names):
        kind = kinds.get(place)
        if kind is None:
            if usual == "decimal":
                doubtful |= _read_points(name, place, rows)
            continue
        is_open = not (kind or usual)
        kind = kind or usual or ("thousands" if delimiter == "," else "decimal")
        for _, cells in rows:
            cell = cells[place]
            if "," not in cell:
                continue
            plain = cell.replace(",", "")
            if kind == "decimal":
                plain = cell.replace(".", "").replace(",", ".")
            if is_open and name not in doubtful:
                doubtful[name] = (
                    f"{name}: {cell} is read as {plain}: is its comma decimal, or "
                    "between thousands? Write numbers with a point"
                )
            cells[place] = plain
    return doubtful


def _read_points(
    name: str, place: int, rows: list[tuple[int, list[str]]]
) -> dict[str, str]:
    """Removes points that separate thousands, in a file with decimal commas."""
    cells = {cells[place] for _, cells in rows if "." in cells[place]}
    if not cells or not all(map(_DOTTED.fullmatch, cells)):
        return {}
    if all(cell.count(".") == 1 for cell in cells):
        example = min(cells)
        return {
            name: f"{name}: {example} is read with a decimal point, and other columns "
            "have decimal commas: is it between thousands?"
        }
    for _, row in rows:
        row[place] = row[place].replace(".", "")
    return {}
