"""Sessions of coding agents: the Weka format, which AIPerf replays.

A session is a JSON object with an `id`, a `block_size` in tokens, a `hash_id_scope`
("local" ids belong to the session, "global" ids to the file) and a list of `requests`.
An entry of the list is a request or a sub-agent:

    request     t (s from the start of the session), in and out (tokens), hash_ids of
                full blocks, and optionally api_time and think_time (s)
    sub-agent   type "subagent", t, duration_ms, status, and its own requests

A file holds one session, JSON lines of sessions or a list of them; a folder holds one
session in each .json file. The sessions of a file start at their recorded times, which
are 0 s in the published files: see `Recording.start_sessions`.

Waits. A request waits for all requests of its list that were answered when it was sent,
other than those that another of these waited for: in a list without overlaps, for the
request before it. The first requests of a sub-agent wait for what the next request of
its agent would wait for, and this request waits for the last ones of the sub-agent,
unless its status is "async_launched". Times may be rounded to 1 s, so that an answer up
to 1 s after a request counts as before it.

Readings. AIPerf describes `t` of a sub-agent as its start. In the files of
kv-cache-tester it is the end: `t` less `duration_ms` is within 1 s of the answer before
it. The end is read where that start is not before the answer. Times of a sub-agent's
requests are from its start, or from the start of the session if the first of them is
not before the sub-agent.

Sources: callanjfox/kv-cache-tester, `docs/trace_replay_tester.md` and `traces`;
ai-dynamo/aiperf, `docs/tutorials/weka-trace.md` and
`src/aiperf/dataset/loader/weka_trace_models.py`.
"""

import itertools
import math
import re
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from jaxkv.files import iterate_objects, read_head
from jaxkv.workloads.chunk_ids import ChunkIds
from jaxkv.workloads.lengths import MAX_TOKEN_COUNT
from jaxkv.workloads.turns import number_in_order, pad_rows

_TOLERANCE_S = 1.0
"""Rounding of the times of requests."""
_SIGN = re.compile(rb'[{,]\s*"requests"\s*:\s*\[')


class AgentSessions(NamedTuple):
    """The requests of all sessions, in an order in which waits go back."""

    arrival_s: Float[np.ndarray, " requests"]
    """Recorded times from the start of each session in s, and no earlier than the times
    of the requests that each request waits for."""
    prompt: Int32[np.ndarray, " requests"]
    """Prompt lengths in tokens."""
    output: Int32[np.ndarray, " requests"]
    """Output lengths in tokens."""
    chunk_ids: ChunkIds
    """Ids of the full chunks of each prompt."""
    chunk_tokens: int
    """Tokens of a chunk."""
    session: Int32[np.ndarray, " requests"]
    """Session of each request."""
    after: Int32[np.ndarray, "requests width"]
    """Requests that each request waits for, -1 in unused columns."""
    delay_s: Float[np.ndarray, " requests"]
    """Time between the last answer that a request waits for and the request in s."""
    num_empty: int
    """Requests without output, which were skipped."""


def has_agent_sessions(path: Path) -> bool:
    """Returns True for a folder, and for JSON objects with a list of `requests`."""
    if path.is_dir():
        return True
    head = read_head(path).lstrip(b"\xef\xbb\xbf \t\r\n")
    return head[:1] in (b"{", b"[") and _SIGN.search(head) is not None


def read_agent_sessions(path: Path, *, skip_empty: bool = False) -> AgentSessions:
    """Reads agent sessions.

    Args:
      path: the file, or a folder with a session in each .json file.
      skip_empty: True to skip and count requests without output, as if they were not in
        their list. Otherwise they are an error.

    Raises:
      ValueError: a file cannot be read, or a request is impossible; one line with the
        file and the place in it.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    reader = _Reader(skip_empty)
    for source in paths:
        for number, session in iterate_objects(source):
            try:
                reader.add(session)
            except ValueError as error:
                raise ValueError(f"{source}: line {number}: {error}") from None
    if not reader.columns["output"]:
        raise ValueError(f"{path}: holds no requests of agent sessions")
    return reader.result()


class _Answered(NamedTuple):
    """Requests that are answered at a time, and the requests that they waited for."""

    end_s: float
    last: list[int]
    waited_for: frozenset[int]


class _Reader:
    """Appends sessions to arrays."""

    def __init__(self, skip_empty: bool) -> None:
        self._skip_empty = skip_empty
        self._num_sessions = self._num_empty = 0
        self._chunk_tokens = 0
        self._after: list[list[int]] = []
        self._end_s = array("d")
        integers = ("prompt", "output", "session", "num_chunks", "chunk_ids")
        self.columns: dict[str, array[Any]] = {
            **{name: array("q") for name in integers},
            **{name: array("d") for name in ("arrival_s", "delay_s")},
        }

    def add(self, session: dict[str, object]) -> None:
        """Appends a session.

        Raises:
          ValueError: a field or a request is impossible.
        """
        size = session.get("block_size")
        if type(size) is not int or not 1 <= size <= MAX_TOKEN_COUNT:
            raise ValueError(f"block_size={size!r} must be in [1, {MAX_TOKEN_COUNT}]")
        if self._chunk_tokens not in (0, size):
            raise ValueError(
                f"block_size={size} must be {self._chunk_tokens}, as in the sessions "
                "before it"
            )
        self._chunk_tokens = size
        scope = session.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise ValueError(f"hash_id_scope={scope!r} must be 'local' or 'global'")
        # Ids of one session are not those of another.
        self._id_offset = self._num_sessions << 32 if scope == "local" else 0
        self._add_list(session.get("requests"), "requests", 0.0, [])
        self._num_sessions += 1

    def _add_list(
        self, entries: object, place: str, start_s: float, first_after: list[int]
    ) -> tuple[list[int], float]:
        """Appends the requests of an agent; they wait for `first_after` at least.

        Returns:
          The last requests, which none of the list waits for, and the time in s at
          which they are answered.
        """
        if not isinstance(entries, list):
            raise ValueError(f"{place} is not a list")
        tips = first_after
        previous = [-1]
        pending: list[_Answered] = []
        agents: list[_Answered] = []  # sub-agents since the last request

        def move_on(now_s: float) -> None:
            nonlocal tips
            for one in sorted(pending, key=lambda x: x.end_s):
                if one.end_s <= now_s + _TOLERANCE_S:
                    pending.remove(one)
                    tips = [x for x in tips if x not in one.waited_for] + one.last

        places = [f"{place}[{i}]" for i in range(len(entries))]
        for i, (entry, where) in enumerate(zip(entries, places, strict=True)):
            if not isinstance(entry, dict):
                raise ValueError(f"{where} is not an object")
            sent_s = start_s + _seconds(entry, "t", where)
            if entry.get("type") == "subagent":
                duration_s = _seconds(entry, "duration_ms", where, default=0.0) / 1e3
                answered_s = max((self._end_s[x] for x in tips), default=-math.inf)
                answered_s = max([answered_s, *(x.end_s for x in pending)])
                if sent_s - duration_s >= answered_s - _TOLERANCE_S:
                    sent_s -= duration_s
                move_on(sent_s)
                inner = entry.get("requests")
                inner_start_s = sent_s
                if isinstance(inner, list) and inner and isinstance(inner[0], dict):
                    first_s = _seconds(inner[0], "t", f"{where}.requests[0]")
                    if first_s >= sent_s - _TOLERANCE_S:
                        inner_start_s = 0.0
                last, end_s = self._add_list(
                    inner, f"{where}.requests", inner_start_s, tips
                )
                if last != tips and entry.get("status") != "async_launched":
                    agents.append(_Answered(-math.inf, last, frozenset(tips)))
                continue
            output = _integer(entry, "out", where, low=0)
            if output == 0 and self._skip_empty:
                self._num_empty += 1
                continue
            if output == 0:
                raise ValueError(f"{where}: the output has 0 tokens")
            pending = pending + agents
            agents = []
            move_on(sent_s)
            think_s = _seconds(entry, "think_time", where, default=math.nan)
            after = tips
            end_s = max((self._end_s[x] for x in after), default=sent_s)
            delay_s = max(0.0, sent_s - end_s)
            if after == previous and not math.isnan(think_s):
                delay_s = think_s
            api_s = _seconds(entry, "api_time", where, default=math.nan)
            if math.isnan(api_s):  # from the time at which the next one was sent
                api_s = _gap_s(entries, i, sent_s - start_s)
            index = len(self._after)
            previous = [index]
            self._append_request(entry, where, output, sent_s, after, delay_s)
            self._end_s.append(sent_s + api_s)
            pending.append(_Answered(sent_s + api_s, [index], frozenset(after)))
        pending += agents
        move_on(math.inf)
        return tips, max((self._end_s[x] for x in tips), default=start_s)

    def _append_request(
        self,
        entry: dict[str, object],
        where: str,
        output: int,
        sent_s: float,
        after: list[int],
        delay_s: float,
    ) -> None:
        columns = self.columns
        prompt = _integer(entry, "in", where, low=1)
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
            raise ValueError(f"{where}: hash_ids is not a list of whole numbers")
        full = prompt // self._chunk_tokens
        if len(ids) not in (0, full, -(-prompt // self._chunk_tokens)):
            raise ValueError(
                f"{where}: {len(ids)} hash_ids for {prompt} tokens, "
                f"{self._chunk_tokens} to each"
            )
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise ValueError(f"{where}: hash_ids must be in [0, 2^32)")
        earliest = max((columns["arrival_s"][x] for x in after), default=0.0)
        columns["arrival_s"].append(max(sent_s, earliest))
        columns["delay_s"].append(delay_s if after else 0.0)
        columns["prompt"].append(prompt)
        columns["output"].append(output)
        columns["session"].append(self._num_sessions)
        columns["num_chunks"].append(len(ids))
        columns["chunk_ids"].extend(map(self._id_offset.__add__, ids))
        self._after.append(after)

    def result(self) -> AgentSessions:
        """Returns the sessions; they share the memory of this reader."""
        dtypes = {"q": np.int64, "d": np.float64}
        columns: dict[str, np.ndarray] = {
            name: np.frombuffer(x, dtypes[x.typecode])
            for name, x in self.columns.items()
        }
        starts = np.concatenate([[0], np.cumsum(columns["num_chunks"])])
        return AgentSessions(
            arrival_s=columns["arrival_s"],
            prompt=columns["prompt"].astype(np.int32),
            output=columns["output"].astype(np.int32),
            chunk_ids=ChunkIds(columns["chunk_ids"], starts),
            chunk_tokens=self._chunk_tokens,
            session=number_in_order(columns["session"]),
            after=pad_rows(self._after),
            delay_s=columns["delay_s"],
            num_empty=self._num_empty,
        )


def _gap_s(entries: list[object], index: int, sent_s: float) -> float:
    """Returns the time until the next request less its think time, at least 0."""
    later = itertools.islice(entries, index + 1, None)
    for entry in later:
        if isinstance(entry, dict) and entry.get("type") != "subagent":
            think_s = entry.get("think_time")
            next_s = entry.get("t")
            if isinstance(think_s, int | float) and isinstance(next_s, int | float):
                return max(0.0, next_s - think_s - sent_s)
            break
    return 0.0


def _seconds(
    entry: dict[str, object], name: str, where: str, default: float | None = None
) -> float:
    """Returns a time of at least 0."""
    value = entry.get(name)
    if value is None and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ValueError(f"{where}: {name}={value!r} is not a time")
    return float(value)


def _integer(entry: dict[str, object], name: str, where: str, *, low: int) -> int:
    value = entry.get(name)
    if type(value) is not int or not low <= value <= MAX_TOKEN_COUNT:
        raise ValueError(
            f"{where}: {name}={value!r} must be in [{low}, {MAX_TOKEN_COUNT}]"
        )
    return value
