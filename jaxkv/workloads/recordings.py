"""Recorded request traces: files in several formats, validated row by row.

A file is a table (CSV, JSON lines, Parquet, ..., see `jaxkv.files.read_blocks`) in one
of the formats of `trace_formats`, or a file or folder of agent sessions
(`agent_traces`). CSV and JSON lines are read in blocks: a request takes 96 bytes while
the file is read, and a chunk id 8. Dates without a time zone are UTC. No value is
corrected silently: an impossible row is an error with its line and the reason, skipped
rows are counted, and rows that are out of order are sorted by time, stably, and
counted.
"""

import math
import os
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Int64

from jaxkv import validation
from jaxkv.workloads import arrivals
from jaxkv.workloads.agent_traces import has_agent_sessions, read_agent_sessions
from jaxkv.workloads.chunk_ids import ChunkIds
from jaxkv.workloads.lengths import MAX_TOKEN_COUNT
from jaxkv.workloads.trace_columns import TraceColumns, read_trace_columns
from jaxkv.workloads.trace_formats import SECONDS_PER_UNIT
from jaxkv.workloads.trace_units import find_chunk_tokens, find_unit, to_arrival_s
from jaxkv.workloads.turns import TurnLinks, link_parents, link_sessions


class Recording(NamedTuple):
    """Requests in order of arrival, on the host."""

    arrival_s: Float[np.ndarray, " requests"]
    """Arrival times in s, from the first request; from 0 in plain files with a column
    `arrival_s`, `arrival_ms`, `arrival_us` or `arrival`, unless it has Unix times."""
    prompt: Int32[np.ndarray, " requests"]
    """Prompt length in tokens, at least 1."""
    output: Int32[np.ndarray, " requests"]
    """Output length in tokens, at least 1."""
    chunk_ids: ChunkIds | None
    """Ids of the chunks of `chunk_tokens` tokens of each prompt, a sequence of arrays.
    The last chunk may be shorter, or a prompt has ids of full chunks only. Equal ids
    mean equal tokens from the start of the prompt to the end of the chunk. None if the
    recording has no ids."""
    num_empty: int
    """Failed requests without output, which were skipped."""
    doubts: tuple[str, ...] = ()
    """Warnings: times that look like another unit or another clock, rows that were
    sorted, and rows that contradict others."""
    chunk_tokens: int | None = None
    """Tokens of a chunk; None if the recording has no ids."""
    num_unsorted: int = 0
    """Rows of the file with a time before that of an earlier row."""
    session: Int32[np.ndarray, " requests"] | None = None
    """Session of each request, numbered from 0; None if the trace has no sessions."""
    after: Int32[np.ndarray, "requests width"] | None = None
    """Requests that must be answered before each request is sent: the turn before it,
    or the sub-agents of an agent. They come earlier in the recording; unused columns
    are -1. None if the trace has no sessions."""
    delay_s: Float[np.ndarray, " requests"] | None = None
    """Time in s between the last of these answers and the request: think time or tool
    time. 0 for requests after none. Where a trace does not have the times of its
    answers, the time since the request before, less `answer_s_per_token`."""

    @property
    def rate(self) -> float:
        """Mean requests per second over the gaps; NaN if all arrive at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (self.arrival_s.size - 1) / span if span > 0 else math.nan

    def at_rate(self, rate: float) -> "Recording":
        """Rescales the arrival times to a mean rate; the pattern of bursts stays.

        Delays within sessions stay as they are.

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

    def start_sessions(self, start_s: Float[np.ndarray, " sessions"]) -> "Recording":
        """Moves each session in time, so that its first request arrives at `start_s`.

        Sessions of agent traces are recorded one by one, and all start at 0 s.

        Args:
          start_s: time of the first request of each session in s, at least 0.

        Raises:
          ValueError: the recording has no sessions, or another number of them.
        """
        if self.session is None:
            raise ValueError("the recording has no sessions")
        num = int(self.session.max()) + 1
        start_s = np.asarray(start_s, np.float64)
        if start_s.shape != (num,) or not (start_s >= 0).all():
            raise ValueError(
                f"start_s must have {num} times of at least 0 s, one of each session"
            )
        first_s = np.full(num, np.inf)
        np.minimum.at(first_s, self.session, self.arrival_s)
        moved = self.arrival_s + (start_s - first_s)[self.session]
        return _sort(self._replace(arrival_s=moved))

    def workload(
        self,
        *,
        clients: int | None = None,
        cache_tokens: int | float | None = None,
        at_recorded_times: bool = False,
    ) -> arrivals.Workload:
        """Returns the workload.

        Args:
          clients: clients of a closed loop; all requests arrive at 0 s in the same
            order. Recordings with sessions are closed loops already, and refuse it.
          cache_tokens: tokens that a prefix cache holds, see `cached_tokens`. Cached
            tokens are the context of a request, and its prompt has the tokens after
            them. None means no cache.
          at_recorded_times: True to send the turns of sessions at their recorded times,
            in an open loop, instead of after their answers.

        Raises:
          ValueError: the recording has no chunk ids for a cache.
        """
        arrival_s = self.arrival_s if clients is None else np.zeros(self.prompt.size)
        more: dict[str, Any] = {}
        prompt = self.prompt
        if cache_tokens is not None:
            more["context"] = cached_tokens(self, cache_tokens)
            prompt = prompt - more["context"]
        if self.after is not None and not at_recorded_times:
            more |= {"after": self.after, "delay_s": self.delay_s}
        return arrivals.make_workload(
            arrival_s, prompt, self.output, clients=clients, **more
        )


@validation.checks_numbers(chunk_tokens=(1, MAX_TOKEN_COUNT + 1), answer_s_per_token=0)
def read_recording(
    path: str | os.PathLike[str],
    *,
    skip_empty: bool = False,
    time_unit: Literal["s", "ms", "us"] | None = None,
    chunk_tokens: int | None = None,
    answer_s_per_token: int | float = 0.0,
) -> Recording:
    """Reads a recording; its format is recognised by its columns.

    Args:
      path: the file, or a folder of agent sessions.
      skip_empty: True to skip and count requests without output, which are failures in
        BurstGPT's files. Otherwise they are an error.
      time_unit: unit of the times. None takes the unit of Unix times from their size
        (10^9 s, 10^12 ms, 10^15 us), and otherwise the documented unit of the format.
      chunk_tokens: tokens for each of `hash_ids`. None takes the only size that fits
        all rows, and otherwise the documented size of the format if it fits.
      answer_s_per_token: seconds per token of the recorded answers, at least 0, for
        traces with sessions and without times of answers.

    Raises:
      ValueError: the file cannot be read or has an unknown format; a row lacks a
        number or has one out of range; some dates have a time zone and some have none;
        the unit of the times or the size of the chunks is open; or no request is left.
        One line with the file and the line in it.
    """
    path = validation.path("path", path)
    if time_unit is not None and time_unit not in SECONDS_PER_UNIT:
        raise ValueError(f"{time_unit=} must be one of {', '.join(SECONDS_PER_UNIT)}")
    if has_agent_sessions(path):
        if time_unit or chunk_tokens or answer_s_per_token:
            raise ValueError(
                f"{path}: has agent sessions, whose units are known; the time unit, "
                "the tokens of a chunk and the seconds per token must be left out"
            )
        sessions = read_agent_sessions(path, skip_empty=skip_empty)
        recording = _sort(Recording(**sessions._asdict()))
        assert recording.chunk_ids is not None
        assert recording.chunk_tokens is not None
        numbers = np.arange(1, recording.prompt.size + 1)
        ids = recording.chunk_ids
        size = recording.chunk_tokens
        doubts = _find_contradiction(ids, recording.prompt, size, "request", numbers)
        return recording._replace(doubts=doubts)
    columns = read_trace_columns(path, skip_empty=skip_empty)
    try:
        unit, doubts = find_unit(columns, time_unit)
        size = find_chunk_tokens(columns, chunk_tokens)
        columns = _fill_turns(columns, size)
        order = np.argsort(columns.time, kind="stable")
        latest = np.maximum.accumulate(columns.time)
        num_unsorted = int(np.sum(columns.time < latest))
        if num_unsorted:
            first = columns.line[np.argmax(columns.time < latest)]
            doubts.append(
                f"{num_unsorted:,} of {order.size:,} rows have a time before an "
                f"earlier row, first line {first}; rows are sorted by time"
            )
            columns = _take(columns, order)
        if columns.chunk_ids is not None and size is not None:
            doubts += _find_contradiction(
                columns.chunk_ids, columns.prompt, size, "line", columns.line
            )
        arrival_s = to_arrival_s(columns, unit)
        links = _link(columns, arrival_s, answer_s_per_token)
        if links is not None and not columns.format.chat:
            is_given = ~np.isnan(columns.delay) & (links.after[:, 0] >= 0)
            per_second = SECONDS_PER_UNIT[time_unit or columns.format.unit or unit]
            recorded_s = columns.delay / per_second
            links = links._replace(
                delay_s=np.where(is_given, recorded_s, links.delay_s)
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Recording(
        arrival_s=arrival_s,
        prompt=columns.prompt.astype(np.int32),
        output=columns.output.astype(np.int32),
        chunk_ids=columns.chunk_ids,
        num_empty=columns.num_empty,
        doubts=(*columns.doubts, *doubts),
        chunk_tokens=size,
        num_unsorted=num_unsorted,
        **({} if links is None else links._asdict()),
    )


def _find_contradiction(
    ids: ChunkIds,
    prompt: Int[np.ndarray, " requests"],
    size: int,
    noun: str,
    numbers: Int[np.ndarray, " requests"],
) -> tuple[str, ...]:
    """Returns a doubt about chunk ids, or none; requests are a noun and a number."""
    pair = ids.find_contradiction(prompt, size)
    if pair is None:
        return ()
    row, earlier, reason = pair
    return (
        f"{noun} {numbers[row]}: a chunk {reason} in {noun} {numbers[earlier]}, with "
        f"the same id; tokens that no earlier {noun} has are not counted as cached",
    )


def num_known_chunks(recording: Recording) -> Int32[np.ndarray, " requests"]:
    """Counts the leading chunks of each prompt that an earlier prompt had as well.

    That is the number of chunks an unbounded prefix cache could find.

    Raises:
      ValueError: the recording has no chunk ids.
    """
    if recording.chunk_ids is None:
        raise ValueError("the recording has no chunk ids")
    return recording.chunk_ids.num_known()


@validation.checks_numbers(cache_tokens="[0, inf]")
def cached_tokens(
    recording: Recording, cache_tokens: int | float = math.inf
) -> Int32[np.ndarray, " requests"]:
    """Returns the leading tokens of each prompt that a prefix cache has.

    The prompts are those of the earlier requests, in order of arrival; answers have no
    chunk ids and count as new where a later prompt contains them. At least one token of
    a prompt is new. Of an id, the tokens count that an earlier prompt had.

    Args:
      recording: the requests, with chunk ids.
      cache_tokens: tokens that the cache holds, at least 0; whole chunks are kept, and
        the least recently used is evicted (`ChunkIds.num_cached`). Infinity for an
        unbounded cache.

    Raises:
      ValueError: the recording has no chunk ids, or `cache_tokens` is out of range.
    """
    ids = recording.chunk_ids
    size = recording.chunk_tokens
    if ids is None or size is None:
        raise ValueError("the recording has no chunk ids")
    if cache_tokens == math.inf:
        num_chunks = ids.num_known()
    else:
        num_chunks = ids.num_cached(int(cache_tokens // size))
    tokens = num_chunks.astype(np.int64) * size
    shared = ids.shared_tokens(recording.prompt, size)
    tokens = np.minimum(tokens, shared)
    return np.minimum(tokens, recording.prompt - 1).astype(np.int32)


def _fill_turns(columns: TraceColumns, chunk_tokens: int | None) -> TraceColumns:
    """Completes the turns of sessions whose later turns have no times or no history.

    A turn without a time is sent a delay after the turn before it, at the earliest. In
    AIPerf's form of Mooncake's traces, a prompt has only the tokens that the turn adds
    to the earlier turns and their answers: the whole prompt has ids of its own after
    the full chunks of the prompt before.

    Raises:
      ValueError: a prompt is longer than any model takes, or a turn is sent before the
        one before it.
    """
    session = columns.session
    kind = columns.format
    turns = np.flatnonzero(session >= 0)
    if not kind.has_turns or not turns.size:
        return columns
    time = columns.time.copy()
    prompt = columns.prompt.copy()
    latest: dict[int, int] = {}
    before = np.full(session.size, -1)
    for turn in turns.tolist():
        before[turn] = last = latest.get(int(session[turn]), -1)
        latest[int(session[turn])] = turn
        delay = columns.delay[turn]
        if np.isnan(time[turn]):
            start = 0.0 if last < 0 else time[last]
            time[turn] = start + (0.0 if np.isnan(delay) else delay)
        if last >= 0:
            if time[turn] < time[last]:
                raise ValueError(
                    f"line {columns.line[turn]}: is sent before the turn before it, "
                    f"line {columns.line[last]}"
                )
            prompt[turn] += prompt[last] + columns.output[last]
            if prompt[turn] > MAX_TOKEN_COUNT:
                raise ValueError(
                    f"line {columns.line[turn]}: the prompt has {prompt[turn]} tokens "
                    "with the earlier turns of its session"
                )
    ids = columns.chunk_ids
    if ids is not None and chunk_tokens is not None and (before >= 0).any():
        ids = _extend_ids(ids, before, prompt, chunk_tokens)
    return columns._replace(time=time, prompt=prompt, chunk_ids=ids)


def _extend_ids(
    ids: ChunkIds,
    before: Int64[np.ndarray, " requests"],
    prompt: Int64[np.ndarray, " requests"],
    size: int,
) -> ChunkIds:
    """Returns ids of whole prompts, with new negative ids after the turn before."""
    parts: list[np.ndarray] = []
    unused = min(0, int(ids.flat.min(initial=0))) - 1
    for turn, last in enumerate(before.tolist()):
        if last < 0:
            parts.append(ids[turn])
            continue
        prefix_ids = parts[last][: int(prompt[last]) // size]
        num_new = -(-int(prompt[turn]) // size) - prefix_ids.size
        parts.append(np.concatenate([prefix_ids, unused - np.arange(num_new)]))
        unused -= num_new
    starts = np.concatenate([[0], np.cumsum([part.size for part in parts])])
    return ChunkIds(np.concatenate(parts), starts)


def _link(
    columns: TraceColumns,
    sent_s: Float[np.ndarray, " requests"],
    answer_s_per_token: int | float,
) -> TurnLinks | None:
    """Returns the waits of the requests, or None in a trace without sessions."""
    kind = columns.format
    guess_s = answer_s_per_token * columns.output
    answer_s = np.where(np.isnan(columns.answer_s), guess_s, columns.answer_s)
    if kind.chat:
        order = np.argsort(columns.chat, kind="stable")
        again = np.flatnonzero(np.diff(columns.chat[order]) == 0)
        if again.size:
            row = order[again[0] + 1]
            raise ValueError(
                f"line {columns.line[row]}: {kind.chat}={columns.chat[row]} is that of "
                f"line {columns.line[order[again[0]]]}"
            )
        try:
            return link_parents(columns.chat, columns.parent, sent_s, answer_s)
        except ValueError as error:
            row, _, reason = str(error).partition(" ")
            raise ValueError(f"line {columns.line[int(row)]}: {reason}") from None
    if not (columns.session >= 0).any():
        return None
    return link_sessions(columns.session, sent_s, answer_s)


def _take(columns: TraceColumns, order: Int64[np.ndarray, " requests"]) -> TraceColumns:
    """Returns the requests in another order."""
    taken = {
        name: value[order]
        for name, value in columns._asdict().items()
        if isinstance(value, np.ndarray)
    }
    if columns.chunk_ids is not None:
        taken["chunk_ids"] = columns.chunk_ids.take(order)
    return columns._replace(**taken)


def _sort(recording: Recording) -> Recording:
    """Sorts the requests by arrival time, stably, and renumbers the waits."""
    order = np.argsort(recording.arrival_s, kind="stable")
    if (np.diff(order) == 1).all():
        return recording
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    taken: dict[str, Any] = {
        name: value[order]
        for name, value in recording._asdict().items()
        if isinstance(value, np.ndarray)
    }
    if recording.after is not None:
        after = taken["after"]
        taken["after"] = np.where(after >= 0, rank[after], -1).astype(np.int32)
    if recording.chunk_ids is not None:
        taken["chunk_ids"] = recording.chunk_ids.take(order)
    return recording._replace(**taken)
