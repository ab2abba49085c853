"""Reads the rows of a trace as arrays, block by block, and validates every row.

An impossible row is an error with its line and the reason. The first one in the file is
reported.
"""

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from jaxkv.files import BLOCK_BYTES, MISSING, RaggedError, TableBlock, read_blocks
from jaxkv.workloads.chunk_ids import ChunkIds
from jaxkv.workloads.lengths import MAX_TOKEN_COUNT
from jaxkv.workloads.trace_formats import DATE, TraceFormat, find_format

type _Problem = tuple[int, str]
"""Row of a block, and the reason."""


class TraceColumns(NamedTuple):
    """The requests of a trace, in the order of the file."""

    format: TraceFormat
    """The format. Its `unit` is `DATE` if the times were dates."""
    line: Int64[np.ndarray, " requests"]
    """Line of each request in the file."""
    time: Float[np.ndarray, " requests"]
    """Times in the unit of the format; microseconds since 1970 for dates. NaN for a
    turn of a session without a time."""
    prompt: Int64[np.ndarray, " requests"]
    """Prompt lengths in tokens, at least 1."""
    output: Int64[np.ndarray, " requests"]
    """Output lengths in tokens, at least 1."""
    session: Int64[np.ndarray, " requests"]
    """Sessions, numbered from 0; -1 for none."""
    answer_s: Float[np.ndarray, " requests"]
    """Time from each request to its answer in s; NaN if it is not recorded."""
    delay: Float[np.ndarray, " requests"]
    """Recorded delays in the unit of the format; NaN if there is none."""
    chat: Int64[np.ndarray, " requests"]
    """Ids to which `parent` refers; -1 in formats without."""
    parent: Int64[np.ndarray, " requests"]
    """Request that each request continues; negative for none."""
    chunk_ids: ChunkIds | None
    """Chunk ids of each prompt."""
    num_empty: int
    """Requests without output, which were skipped."""
    doubts: tuple[str, ...]
    """Remarks about numbers with two possible readings."""


def read_trace_columns(
    path: Path, *, skip_empty: bool, block_bytes: int = BLOCK_BYTES
) -> TraceColumns:
    """Reads a trace.

    Args:
      path: a table in one of the formats of `trace_formats`.
      skip_empty: True to skip and count requests without output.
      block_bytes: as for `files.read_blocks`.

    Raises:
      ValueError: the file cannot be read, or a row is impossible; one line with the
        file, and the line in it.
    """
    reader: _Reader | None = None
    try:
        for block in read_blocks(path, block_bytes=block_bytes):
            reader = reader or _Reader(block, skip_empty)
            reader.add(block)
        if reader is None or not reader.columns["line"]:
            raise ValueError("holds no requests")
        return reader.result()
    except RaggedError as error:
        raise ValueError(
            f"{path}: line {error.line}: {error.num_cells} cells, the header has "
            f"{error.num_names}"
        ) from None
    except ValueError as error:
        named = str(error).startswith(f"{path}: ")
        raise ValueError(error if named else f"{path}: {error}") from None


class _Reader:
    """Converts blocks and appends them to arrays.

    Attributes:
      columns: the columns of `TraceColumns` so far, and `num_chunks`, `chunk_ids`.
    """

    def __init__(self, block: TableBlock, skip_empty: bool) -> None:
        """Recognises the format by the columns of the first block."""
        self._skip_empty = skip_empty
        kind = find_format(block.columns, block.repeated)
        first = next(iter(block.columns.get(kind.time, ())), None)
        is_date = isinstance(first, str) and not _is_number(first)
        if not kind.unit and is_date:
            kind = kind._replace(unit=DATE)
        elif kind.unit == DATE and first is not None and not is_date:
            kind = kind._replace(unit="s")
        self._kind = kind
        self._doubtful = {x for x in kind.required if x in block.doubtful}
        self._doubts = tuple(block.doubtful[x] for x in self._doubtful)
        self._first_date: tuple[bool, int] | None = None
        self._has_ids: bool | None = None
        self._sessions: dict[object, int] = {}
        self._num_empty = 0
        self._num_unequal = self._first_unequal = 0
        integers = ("line", "prompt", "output", "session", "chat", "parent")
        self.columns: dict[str, array[float] | array[int]] = {
            **{name: array("q") for name in (*integers, "num_chunks", "chunk_ids")},
            **{name: array("d") for name in ("time", "answer_s", "delay")},
        }

    def add(self, block: TableBlock) -> None:
        """Appends a block.

        Raises:
          ValueError: a row is impossible.
        """
        kind = self._kind
        num = len(block.lines)
        problems: list[_Problem] = []

        def cells(name: str) -> Sequence[object]:
            return block.columns.get(name, (MISSING,) * num)

        def column(
            name: str, convert: Callable[[Any], float], kind: str, *, optional: bool
        ) -> np.ndarray:
            return _convert(cells(name), name, convert, kind, optional, problems)

        session = self._read_sessions(cells(kind.session))
        is_turn = session >= 0 if kind.has_turns else np.zeros(num, bool)
        if kind.unit == DATE:
            time = self._read_dates(block, cells(kind.time), problems)
        else:
            optional = bool(is_turn.any())
            time = column(kind.time, _to_float, "a time", optional=optional)
            if optional:
                late = np.isnan(time) & ~is_turn
                _add_first(problems, late, lambda _: f"has no {kind.time}")
        if kind.time.startswith("arrival") and kind.unit != DATE:
            _add_first(
                problems,
                time < 0,
                lambda row: (
                    f"arrives at {time[row]} {kind.unit}".rstrip() + ", before 0"
                ),
            )
        prompt = column(kind.prompt, _to_integer, "whole", optional=False)
        output = column(kind.output, _to_integer, "whole", optional=False)
        is_empty = (output == 0) & self._skip_empty
        for name, values, wrong in (
            (
                "prompt",
                kind.prompt,
                ((prompt < 1) | (prompt > MAX_TOKEN_COUNT)) & ~is_empty,
            ),
            (
                "output",
                kind.output,
                ((output < 1) | (output > MAX_TOKEN_COUNT)) & ~is_empty,
            ),
            ("prompt", kind.prompt, is_empty & (prompt < 0)),
        ):
            _add_first(
                problems,
                wrong,
                lambda row, name=name, values=values: (
                    f"the {name} has {_to_integer(cells(values)[row])} tokens"
                ),
            )
        if kind.total in block.columns:
            total = column(kind.total, _to_integer, "whole", optional=False)
            unequal = np.flatnonzero(total != prompt + output)
            if unequal.size and not self._num_unequal:
                self._first_unequal = int(block.lines[int(unequal[0])])
            self._num_unequal += unequal.size
        nan = np.full(num, np.nan)
        none = np.full(num, -1)
        answer_s = delay = nan
        chat = parent = none
        if kind.answer:
            answer_s = column(kind.answer, _to_float, "a time", optional=True)
            wrong = answer_s < 0
            _add_first(problems, wrong, lambda _: f"{kind.answer} is negative")
        if kind.delay:
            delay = column(kind.delay, _to_float, "a time", optional=True)
            _add_first(problems, delay < 0, lambda _: f"{kind.delay} is negative")
        if kind.chat:
            chat = column(kind.chat, _to_integer, "whole", optional=False)
            parent = column(kind.parent, _to_integer, "whole", optional=False)
        ids, num_chunks = self._read_ids(cells(kind.hash_ids), problems)
        if problems:
            row, reason = min(problems, key=lambda problem: problem[0])
            raise ValueError(f"line {block.lines[row]}: {reason}")
        mask = ~is_empty
        self._num_empty += num - int(mask.sum())
        values = {
            "line": np.asarray(block.lines, np.int64),
            "time": time,
            "prompt": prompt,
            "output": output,
            "session": session,
            "answer_s": answer_s,
            "delay": delay,
            "chat": chat,
            "parent": parent,
            "num_chunks": num_chunks,
        }
        for name, column_array in values.items():
            self._append(name, column_array[mask])
        self._append("chunk_ids", ids[np.repeat(mask, num_chunks)])

    def result(self) -> TraceColumns:
        """Returns the columns; they share the memory of this reader."""
        dtypes = {"q": np.int64, "d": np.float64}
        columns: dict[str, np.ndarray] = {
            name: np.frombuffer(x, dtypes[x.typecode])
            for name, x in self.columns.items()
        }
        flat = columns.pop("chunk_ids")
        counts = columns.pop("num_chunks")
        starts = np.concatenate([[0], np.cumsum(counts)])
        doubts = self._doubts
        if self._num_unequal:
            kind = self._kind
            doubts += (
                f"{kind.total} is not {kind.prompt} + {kind.output} in "
                f"{self._num_unequal:,} rows, first line {self._first_unequal}; it is "
                "not used",
            )
        return TraceColumns(
            format=self._kind,
            **columns,
            chunk_ids=ChunkIds(flat, starts) if self._has_ids else None,
            num_empty=self._num_empty,
            doubts=doubts,
        )

    def _append(self, name: str, values: np.ndarray) -> None:
        column = self.columns[name]
        column.frombytes(values.astype(column.typecode).tobytes())

    def _read_sessions(self, cells: Sequence[object]) -> np.ndarray:
        if not cells or (cells[0] is MISSING and not self._kind.session):
            return np.full(len(cells), -1)
        session_index = self._sessions
        absent = (MISSING, None, "")
        return np.fromiter(
            (
                -1 if x in absent else session_index.setdefault(x, len(session_index))
                for x in cells
            ),
            np.int64,
            len(cells),
        )

    def _read_dates(
        self, block: TableBlock, cells: Sequence[object], problems: list[_Problem]
    ) -> np.ndarray:
        """Returns microseconds since 1970; dates without a zone are UTC."""
        name = self._kind.time

        def convert(cell: str) -> float:
            moment = datetime.fromisoformat(cell)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            # Exact: the product has 51 bits in this century.
            return float(round(moment.timestamp() * 1e6))

        micros = _convert(cells, name, convert, "a time", False, problems)
        for row, cell in enumerate(cells):
            # In ISO 8601, only a time zone has these characters after the date.
            tail = str(cell)[10:]
            has_zone = "+" in tail or "-" in tail or "Z" in tail or "z" in tail
            line = block.lines[row]
            self._first_date = self._first_date or (has_zone, line)
            if has_zone != self._first_date[0]:
                has = "has a zone" if has_zone else "has no zone"
                like = f"unlike line {self._first_date[1]}"
                problems.append((row, f"{name}={cell!r} {has}, {like}"))
                break
        return micros

    def _read_ids(
        self, cells: Sequence[Any], problems: list[_Problem]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunk ids of all rows, and the number of each row's."""
        if self._has_ids is None and cells:
            has_column = bool(self._kind.hash_ids)
            self._has_ids = has_column and cells[0] not in (MISSING, None)
        if not self._has_ids:
            return np.zeros(0, np.int64), np.zeros(len(cells), np.int64)

        def is_wrong(cell: object) -> bool:
            return type(cell) is not list or not {*map(type, cell)} <= {int}

        reason = f"{self._kind.hash_ids} is not a list of whole numbers"
        if {*map(type, cells)} != {list} or not {
            *map(type, itertools.chain.from_iterable(cells))
        } <= {int}:
            wrong = np.fromiter(map(is_wrong, cells), bool, len(cells))
            _add_first(problems, wrong, lambda _: reason)
            return np.zeros(0, np.int64), np.zeros(len(cells), np.int64)
        counts = np.fromiter(map(len, cells), np.int64, len(cells))
        every = itertools.chain.from_iterable(cells)
        try:
            return np.fromiter(every, np.int64, int(counts.sum())), counts
        except OverflowError:
            wrong = [any(not -(2**63) <= x < 2**63 for x in cell) for cell in cells]
            reason = f"{self._kind.hash_ids} must be in [-2^63, 2^63)"
            _add_first(problems, np.array(wrong), lambda _: reason)
            return np.zeros(0, np.int64), np.zeros(len(cells), np.int64)


def _convert(
    cells: Sequence[Any],
    name: str,
    convert: Callable[[Any], float],
    kind: str,
    optional: bool,
    problems: list[_Problem],
) -> np.ndarray:
    """Converts a column; the first impossible cell becomes a problem.

    Optional cells may be absent or empty: they are NaN.
    """
    num = len(cells)
    is_whole = convert is _to_integer
    types = {*map(type, cells)}
    try:  # whole columns of one type, which have no other readings
        if is_whole and types <= {int}:
            return np.fromiter(cells, np.int64, num)
        if is_whole and types <= {str}:
            return np.fromiter(map(int, cells), np.int64, num)
        if convert is _to_float and (types <= {int, float} or types <= {str}):
            values = np.fromiter(map(float, cells), np.float64, num)
            if np.isfinite(values).all():
                return values
    except (ValueError, OverflowError):
        pass
    values = np.full(num, 0 if is_whole else np.nan, np.int64 if is_whole else float)
    for row, cell in enumerate(cells):
        if cell is MISSING or (optional and cell in (None, "")):
            if optional:
                continue
            problems.append((row, f"has no {name}"))
            break
        try:
            value = convert(cell)
            if not math.isfinite(value):
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            problems.append((row, f"{name}={cell!r} is not {kind}"))
            break
        # Far outside of all ranges, which are checked next.
        values[row] = max(-(2**62), min(value, 2**62)) if is_whole else value
    return values


def _add_first(
    problems: list[_Problem], wrong: np.ndarray, reason: Callable[[int], str]
) -> None:
    """Adds the first wrong row, if it comes before all other problems."""
    first = min((row for row, _ in problems), default=wrong.size)
    if wrong[:first].any():
        row = int(np.argmax(wrong))
        problems.append((row, reason(row)))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _to_integer(value: Any) -> int:
    """Converts an integer such as 10, "10", 10.0, "10.0" or "1e3"."""
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = float(value)
    if int(value) != value:
        raise ValueError
    return int(value)
