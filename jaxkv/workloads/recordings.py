"""Requests that somebody recorded: files of them, checked row by row.

    Azure       CSV  TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT    CSV  Timestamp, Request tokens, Response tokens (and others)
    plain       CSV  arrival_s, prompt_tokens, output_tokens
    Mooncake    JSON lines  timestamp (ms), input_length, output_length, hash_ids
    ShareGPT    JSON, a list of conversations; texts without times

A file is known by its columns. Nothing is put right in silence: a row that no server
could have seen is refused, with its line and the reason, and what is left out because
the caller asked for it is counted.

Sources: Patel et al. 2024 (Splitwise), arXiv:2311.18677; Wang et al. 2024 (BurstGPT),
arXiv:2401.17644; Qin et al. 2025 (Mooncake), FAST.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32, Int64

from jaxkv import files
from jaxkv.workloads import arrivals
from jaxkv.workloads.lengths import LONGEST, Lengths

CHUNK = 512
"""Tokens of a prompt that one of Mooncake's ids stands for."""


class Recording(NamedTuple):
    """Requests in order of arrival, on the host."""

    arrival_s: Float[np.ndarray, " requests"]
    """Seconds; from the first request, or from 0 in a plain file."""
    prompt: Int32[np.ndarray, " requests"]
    """Tokens, at least 1."""
    output: Int32[np.ndarray, " requests"]
    """Tokens, at least 1."""
    chunk_ids: tuple[Int64[np.ndarray, " chunks"], ...] | None
    """Ids of the prompts' runs of `CHUNK` tokens, the last one perhaps shorter: where
    ids are equal, so is everything up to there. None where nobody recorded them."""
    num_empty: int
    """Requests that failed, without any output, and were left out."""

    @property
    def rate(self) -> float:
        """Requests per second on average, over the gaps; NaN if all came at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (self.arrival_s.size - 1) / span if span > 0 else math.nan

    def at_rate(self, rate: float) -> "Recording":
        """Replays it faster or slower, the pattern of bursts kept.

        Args:
          rate: requests per second on average, above 0.

        Raises:
          ValueError: `rate` is out of range, or all requests came at once.
        """
        if not 0 < rate < math.inf:
            raise ValueError(f"{rate=} must be above 0 requests per second")
        if math.isnan(self.rate):
            raise ValueError("requests that came at once have no rate to scale")
        return self._replace(arrival_s=self.arrival_s * (self.rate / rate))

    def workload(self, *, clients: int | None = None) -> arrivals.Workload:
        """Makes the workload; with `clients`, their order is kept, not their times."""
        arrival_s = self.arrival_s if clients is None else np.zeros(self.prompt.size)
        return arrivals.make(arrival_s, self.prompt, self.output, clients=clients)


class _Row(NamedTuple):
    """What a row says, and where it stands."""

    line: int
    arrival_s: float
    prompt: int
    output: int
    chunk_ids: tuple[int, ...] | None


def read(path: Path, *, skip_empty: bool = False) -> Recording:
    """Reads a recording: a CSV or JSON lines, known by its columns.

    Args:
      path: the file.
      skip_empty: leaves requests without any output out, and counts them; such failures
        stand in BurstGPT's files. Otherwise they are refused.

    Raises:
      ValueError: the file cannot be read or is of no known kind; a row lacks a number,
        has one out of range, or arrives before the row ahead of it; nothing is left.
        One line that names the file, and the line in it.
    """
    text = _text(path)
    rows = _json_lines if text.lstrip()[:1] == "{" else _csv
    kept: list[_Row] = []
    num_empty, before = 0, None
    try:
        for row in rows(text):
            _check(row, before)
            before = row
            if skip_empty and row.output == 0:
                num_empty += 1
            elif row.output < 1:
                raise ValueError(f"line {row.line}: the output has {row.output} tokens")
            else:
                kept.append(row)
        if not kept:
            raise ValueError("holds no requests")
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from None
    ids = [row.chunk_ids for row in kept if row.chunk_ids is not None]
    return Recording(
        arrival_s=np.array([row.arrival_s for row in kept]),
        prompt=np.array([row.prompt for row in kept], np.int32),
        output=np.array([row.output for row in kept], np.int32),
        chunk_ids=tuple(np.array(x, np.int64) for x in ids) if ids else None,
        num_empty=num_empty,
    )


def num_known_chunks(recording: Recording) -> Int32[np.ndarray, " requests"]:
    """Counts the chunks of each prompt that earlier prompts began with, too.

    It is what a prefix cache without bounds could find, whole chunks of it.

    Raises:
      ValueError: nobody recorded what the prompts have in common.
    """
    if recording.chunk_ids is None:
        raise ValueError("the recording has no ids of chunks")
    seen: set[int] = set()
    counts = []
    for ids in recording.chunk_ids:
        # An id stands for its chunk and all before it.
        is_known = [int(x) in seen for x in ids]
        counts.append(is_known.index(False) if False in is_known else len(is_known))
        seen.update(map(int, ids))
    return np.array(counts, np.int32)


def read_sharegpt(path: Path, encode: Callable[[str], list[int]]) -> Lengths:
    """Reads the lengths of conversations: the first question and its answer.

    Conversations without both, or in which either has no token, are left out.

    Args:
      path: a JSON list of objects with `conversations`, lists of turns `from`, `value`.
      encode: a tokenizer's.

    Returns:
      The lengths, in the order of the file.

    Raises:
      ValueError: the file cannot be read, is no such list, or none is left; one line
        that names the file, and the entry, counted from 1.

    Source: the choice of turns is that of vLLM's `benchmarks/benchmark_serving.py`.
    """
    entries = files.parse_json(_text(path), path)
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
    """A kind of CSV: its columns, and how its times are read."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[str], float]


def _since_1970(cell: str) -> float:
    return datetime.fromisoformat(cell).timestamp()


_KINDS = (
    _Kind("TIMESTAMP", "ContextTokens", "GeneratedTokens", _since_1970),
    _Kind("Timestamp", "Request tokens", "Response tokens", float),
    _Kind("arrival_s", "prompt_tokens", "output_tokens", float),
)


def _csv(text: str) -> Iterator[_Row]:
    """Reads a CSV of any known kind."""
    lines = csv.reader(text.splitlines(keepends=True), strict=True)
    names = [cell.strip() for cell in next(lines, [])]
    kind = next((k for k in _KINDS if {*k[:3]} <= {*names}), None)
    if kind is None:
        known = "; ".join(", ".join(k[:3]) for k in _KINDS)
        raise ValueError(f"its columns are {', '.join(names)}; known are: {known}")
    start = 0.0 if kind.time == "arrival_s" else None
    for cells in lines:
        line = lines.line_num
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(names):
            raise ValueError(
                f"line {line}: {len(cells)} cells, the header has {len(names)}"
            )
        row = dict(zip(names, cells, strict=True))
        seconds = _number(row, kind.time, line, kind.seconds)
        start = seconds if start is None else start
        yield _Row(
            line,
            seconds - start,
            _number(row, kind.prompt, line, int),
            _number(row, kind.output, line, int),
            None,
        )


def _json_lines(text: str) -> Iterator[_Row]:
    """Reads Mooncake's lines."""
    start = None
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        row = files.parse_object(content, f"line {line}")
        seconds = _number(row, "timestamp", line, _milliseconds)
        start = seconds if start is None else start
        prompt = _number(row, "input_length", line, _whole)
        yield _Row(
            line,
            seconds - start,
            prompt,
            _number(row, "output_length", line, _whole),
            _chunk_ids(row, prompt, line),
        )


def _milliseconds(value: Any) -> float:
    return float(value) / 1e3


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError
    return int(value)


def _chunk_ids(row: Mapping[str, Any], prompt: int, line: int) -> tuple[int, ...]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(x) is int for x in ids):
        raise ValueError(f"line {line}: hash_ids is not a list of whole numbers")
    if len(ids) != -(-prompt // CHUNK):
        raise ValueError(
            f"line {line}: {len(ids)} hash_ids for {prompt} tokens, {CHUNK} to each"
        )
    return tuple(ids)


def _number[T: (int, float)](
    row: Mapping[str, Any], name: str, line: int, convert: Callable[[Any], T]
) -> T:
    """Reads a cell.

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


def _check(row: _Row, before: _Row | None) -> None:
    """Refuses a row that cannot be.

    Raises:
      ValueError: names it.
    """
    if row.arrival_s < 0 and before is None:
        raise ValueError(f"line {row.line}: arrives at {row.arrival_s} s, before 0")
    if before is not None and row.arrival_s < before.arrival_s:
        raise ValueError(
            f"line {row.line}: arrives before line {before.line}; is the file sorted?"
        )
    if not 1 <= row.prompt <= LONGEST:
        raise ValueError(f"line {row.line}: the prompt has {row.prompt} tokens")
    if not 0 <= row.output <= LONGEST:
        raise ValueError(f"line {row.line}: the output has {row.output} tokens")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
