"""Recorded request traces: files in several formats, validated row by row.

    Azure       TIMESTAMP (a date), ContextTokens, GeneratedTokens
    BurstGPT    Timestamp (s), Request tokens, Response tokens (more are ignored)
    plain       arrival_s, prompt_tokens, output_tokens
    Mooncake    timestamp (ms), input_length, output_length, hash_ids
    ShareGPT    JSON, a list of conversations; texts without times

A file is any table (`jaxkv.files.tables`: CSV, JSON lines, Parquet, ...) with these
columns. Dates without a time zone are UTC. No row is corrected silently: an impossible
row is an error with its line and the reason, and rows that the caller asked to skip are
counted.

Sources: Patel et al. 2024 (Splitwise), arXiv:2311.18677; Wang et al. 2024 (BurstGPT),
arXiv:2401.17644; Qin et al. 2025 (Mooncake), FAST.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32, Int64

from jaxkv import files
from jaxkv.files import RaggedError, RawTable, read_decompressed_text, read_table
from jaxkv.workloads import arrivals
from jaxkv.workloads.lengths import LONGEST, Lengths

CHUNK_TOKENS = 512
"""Tokens of a prompt per chunk id in Mooncake's traces."""


class Recording(NamedTuple):
    """Requests in order of arrival, on the host."""

    arrival_s: Float[np.ndarray, " requests"]
    """Arrival times in s, from the first request, or from 0 in a plain file."""
    prompt: Int32[np.ndarray, " requests"]
    """Prompt length in tokens, at least 1."""
    output: Int32[np.ndarray, " requests"]
    """Output length in tokens, at least 1."""
    chunk_ids: tuple[Int64[np.ndarray, " chunks"], ...] | None
    """Ids of the chunks of `CHUNK_TOKENS` tokens of each prompt; the last chunk may be
    shorter. Equal ids mean equal tokens from the start of the prompt to the end of the
    chunk. None if the recording has no ids."""
    num_empty: int
    """Failed requests without output, which were skipped."""
    doubts: tuple[str, ...] = ()
    """Warnings about times that look like another unit."""

    @property
    def rate(self) -> float:
        """Mean requests per second over the gaps; NaN if all arrive at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (self.arrival_s.size - 1) / span if span > 0 else math.nan

    def at_rate(self, rate: float) -> "Recording":
        """Rescales the arrival times to a mean rate; the pattern of bursts stays.

        Args:
          rate: mean requests per second, above 0.

        Raises:
          ValueError: `rate` is out of range, or all requests arrive at once.
        """
        if not 0 < rate < math.inf:
            raise ValueError(f"{rate=} must be above 0 requests per second")
        if math.isnan(self.rate):
            raise ValueError("requests that came at once have no rate to scale")
        return self._replace(arrival_s=self.arrival_s * (self.rate / rate))

    def workload(self, *, clients: int | None = None) -> arrivals.Workload:
        """Returns the workload; with `clients`, all arrive at 0 s in the same order."""
        arrival_s = self.arrival_s if clients is None else np.zeros(self.prompt.size)
        return arrivals.make_workload(
            arrival_s, self.prompt, self.output, clients=clients
        )


class _Row(NamedTuple):
    """A validated request, its line in the file, and its time as written."""

    line: int
    arrival_s: float
    prompt: int
    output: int
    chunk_ids: tuple[int, ...] | None


def read_recording(path: Path, *, skip_empty: bool = False) -> Recording:
    """Reads a recording; its format is recognised by its columns.

    Args:
      path: the file.
      skip_empty: True to skip and count requests without output, which are failures in
        BurstGPT's files. Otherwise they are an error.

    Raises:
      ValueError: the file cannot be read or has an unknown format; a row lacks a
        number, has one out of range, or arrives before the previous row; some dates
        have a time zone and some have none; or no request is left. One line with the
        file and the line in it.
    """
    try:
        table = read_table(path, keep_lists=True, allow_partial=False)
    except RaggedError as error:
        raise ValueError(
            f"{path}: line {error.line}: {error.num_cells} cells, the header has "
            f"{error.num_names}"
        ) from None
    kept: list[_Row] = []
    num_empty, before = 0, None
    try:
        # The format of which all columns are in the table.
        names = {*table.names}
        kind = next((kind for kind in _KINDS if {*kind[:3]} <= names), None)
        if kind is None and _MOONCAKE.time in names:
            kind = _MOONCAKE  # the error has the row that lacks a number
        if kind is None:
            for name in table.repeated:
                if any(name in kind[:3] for kind in _KINDS):
                    raise ValueError(f"two columns are named {name!r}")
            known = "; ".join(", ".join(k[:3]) for k in _KINDS)
            shown = ", ".join(table.names)
            raise ValueError(f"its columns are {shown}; known are: {known}")
        for row in _rows(table, kind):
            if row.arrival_s < 0 and before is None:
                raise ValueError(
                    f"line {row.line}: arrives at {row.arrival_s} s, before 0"
                )
            if before is not None and row.arrival_s < before.arrival_s:
                raise ValueError(
                    f"line {row.line}: arrives before line {before.line}; is the file "
                    "sorted?"
                )
            before = row
            for name, num, low in (
                ("prompt", row.prompt, 1),
                ("output", row.output, 0),
            ):
                if not low <= num <= LONGEST:
                    raise ValueError(f"line {row.line}: the {name} has {num} tokens")
            if skip_empty and row.output == 0:
                num_empty += 1
            elif row.output < 1:
                raise ValueError(f"line {row.line}: the output has {row.output} tokens")
            else:
                kept.append(row)
        if not kept:
            raise ValueError("holds no requests")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    ids = [row.chunk_ids for row in kept if row.chunk_ids is not None]
    arrival_s = np.array([row.arrival_s for row in kept])
    return Recording(
        arrival_s=arrival_s,
        prompt=np.array([row.prompt for row in kept], np.int32),
        output=np.array([row.output for row in kept], np.int32),
        chunk_ids=tuple(np.array(x, np.int64) for x in ids) if ids else None,
        num_empty=num_empty,
        doubts=_unit_warnings(table, kind, arrival_s),
    )


def num_known_chunks(recording: Recording) -> Int32[np.ndarray, " requests"]:
    """Counts the leading chunks of each prompt that an earlier prompt had as well.

    That is the number of chunks an unbounded prefix cache could find.

    Raises:
      ValueError: the recording has no chunk ids.
    """
    if recording.chunk_ids is None:
        raise ValueError("the recording has no chunk ids")
    seen: set[int] = set()
    counts = []
    for ids in recording.chunk_ids:
        # Equal ids mean equal tokens up to the end of the chunk.
        is_known = [int(x) in seen for x in ids]
        counts.append(is_known.index(False) if False in is_known else len(is_known))
        seen.update(map(int, ids))
    return np.array(counts, np.int32)


def read_sharegpt(path: Path, encode: Callable[[str], list[int]]) -> Lengths:
    """Reads the lengths of conversations: the first question and its answer.

    Conversations without both, or in which either has no token, are skipped.

    Args:
      path: JSON list of objects with `conversations`, lists of turns with `from` and
        `value`.
      encode: encoding function of a tokenizer.

    Returns:
      The lengths, in the order of the file.

    Raises:
      ValueError: the file cannot be read, is no such list, or no conversation is left;
        one line with the file and the entry, counted from 1.

    Source: the choice of turns is that of vLLM's `benchmarks/benchmark_serving.py`.
    """
    entries = files.parse_json(read_decompressed_text(path), path)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: holds {type(entries).__name__}, not a list")
    found = []
    for number, entry in enumerate(entries, 1):
        try:
            texts = [turn["value"] for turn in entry["conversations"][:2]]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError
        except (KeyError, TypeError):
            raise ValueError(
                f"{path}: entry {number}: has no conversations of turns with a value"
            ) from None
        sizes = [len(encode(text)) for text in texts]
        if len(sizes) == 2 and min(sizes) >= 1:
            found.append(sizes)
    if not found:
        raise ValueError(f"{path}: holds no conversation of two turns")
    tokens = np.array(found, np.int32)
    return Lengths(tokens[:, 0], tokens[:, 1])


class _Kind(NamedTuple):
    """Columns of a format, and the conversion of its times to s."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _since_1970(cell: Any) -> float:
    moment = datetime.fromisoformat(cell)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


_KINDS = (
    _Kind("TIMESTAMP", "ContextTokens", "GeneratedTokens", _since_1970),
    _Kind("Timestamp", "Request tokens", "Response tokens", _float),
    _Kind("arrival_s", "prompt_tokens", "output_tokens", _float),
    _Kind("timestamp", "input_length", "output_length", lambda x: _float(x) / 1e3),
)
_MOONCAKE = _KINDS[-1]


def _rows(table: RawTable, kind: _Kind) -> Iterator[_Row]:
    """Yields the rows of a format, with times from the first row's, or from 0 s."""
    start = 0.0 if kind.time == "arrival_s" else None
    first: tuple[bool, int] | None = None
    for row in table.rows if kind.seconds is _since_1970 else ():
        cell, line = str(row.cells.get(kind.time)), row.line or row.number
        # In ISO 8601, only a time zone has these characters after the date.
        has_zone = any(mark in cell[10:] for mark in "+-Zz")
        first = first or (has_zone, line)
        if has_zone != first[0]:
            has = "has a zone" if has_zone else "has no zone"
            raise ValueError(
                f"line {line}: {kind.time}={cell!r} {has}, unlike line {first[1]}"
            )
    for row in table.rows:
        line = row.line or row.number
        seconds = _read_cell(row.cells, kind.time, line, kind.seconds)
        start = seconds if start is None else start
        prompt = _read_cell(row.cells, kind.prompt, line, _to_integer)
        output, ids = _read_cell(row.cells, kind.output, line, _to_integer), None
        if kind is _MOONCAKE:
            ids = row.cells.get("hash_ids")
            if not isinstance(ids, list) or not all(type(x) is int for x in ids):
                raise ValueError(
                    f"line {line}: hash_ids is not a list of whole numbers"
                )
            if len(ids) != -(-prompt // CHUNK_TOKENS):
                raise ValueError(
                    f"line {line}: {len(ids)} hash_ids for {prompt} tokens, "
                    f"{CHUNK_TOKENS} to each"
                )
            ids = tuple(ids)
        yield _Row(line, seconds - start, prompt, output, ids)


_LONG_GAP_S = 60.0
"""Mean time between requests above which integer seconds may be milliseconds."""
_HIGH_RATE, _HIGH_RATE_OF_FRACTIONS = 1e3, 50.0
"""Requests per second above which milliseconds may be seconds; for integers and for
fractions."""
_EPOCH_S, _EPOCH_MS = (1e9, 1e10), 1e11
"""Unix times: seconds of the years 2001 to 2286; smallest milliseconds, of 1973."""


def _unit_warnings(
    table: RawTable, kind: _Kind, arrival_s: Float[np.ndarray, " requests"]
) -> tuple[str, ...]:
    """Returns warnings about times that look like another unit."""
    found = [line for name, line in table.doubtful.items() if name in kind[:3]]
    if kind.seconds is _since_1970:
        return tuple(found)
    name, num = kind.time, arrival_s.size
    span = float(arrival_s[-1] - arrival_s[0])
    first = _float(table.rows[0].cells[name])
    if kind.seconds is _float:
        is_whole = not np.any((arrival_s - arrival_s[0]) % 1)
        is_long = num > 2 and is_whole and span > _LONG_GAP_S * (num - 1)
        if first >= _EPOCH_MS or is_long:
            found.append(
                f"{name} is read as seconds: {num:,} requests in {span:,.4g} s; are "
                "they milliseconds?"
            )
    else:
        has_fractions = np.any(arrival_s * 1e3 % 1 > 1e-6)
        most = _HIGH_RATE_OF_FRACTIONS if has_fractions else _HIGH_RATE
        is_short = num > 2 and 0 < span * most < num - 1
        if _EPOCH_S[0] <= first < _EPOCH_S[1] or is_short:
            found.append(
                f"{name} is read as milliseconds: {num:,} requests in {span:,.4g} s; "
                "are they seconds?"
            )
    return tuple(found)


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


def _read_cell[T: (int, float)](
    row: Mapping[str, Any], name: str, line: int, convert: Callable[[Any], T]
) -> T:
    """Converts a cell.

    Raises:
      ValueError: it is missing, or not such a number.
    """
    if name not in row:
        raise ValueError(f"line {line}: has no {name}")
    try:
        value = convert(row[name])
        if not math.isfinite(value):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        kind = "a time" if name.lower() in ("timestamp", "arrival_s") else "whole"
        raise ValueError(f"line {line}: {name}={row[name]!r} is not {kind}") from None
    return value
