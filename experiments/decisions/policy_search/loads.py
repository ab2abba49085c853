"""Hours of traffic from recordings, and their split into three parts.

An hour has a name, such as `sessions/long/3` or `azure_conv/7`. Within each traffic,
the hours are sorted by the SHA-256 of their names: the first are for training, then
validation, then the test. `split.json` has the parts and the SHA-256 of each hour's
contents, committed before the search.

`sessions.json` has 1,923 sessions that were rebuilt from a recording: the new prompt
tokens and the answer of each turn. The hours of a traffic have different sessions. The
arrivals of sessions and the times between turns are drawn: the recorded times are those
of people, and agents return sooner.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv.scheduling import RequestAttributes
from jaxkv.workloads import Workload, make_workload, read_recording

PARTS = ("train", "validation", "test")
DATA_VARIABLE = "JAXKV_DATA"
"""Environment variable with the folder that contains `traces/`."""
_SESSIONS = Path(__file__).with_name("sessions.json")
_TOOL_SIGMA = 1.5
"""Standard deviation of the logarithm of the time between turns."""


class SessionTraffic(NamedTuple):
    """A choice of the recorded sessions, and the time between their turns."""

    tool_s: float
    """Mean time between an answer and the next turn in s, lognormal."""
    min_turns: int = 2
    min_tokens: int = 0
    """Smallest number of tokens of a session, prompts and answers."""
    max_tokens: int = 48_000


TRAFFICS = {
    "all": SessionTraffic(tool_s=4.0),
    "turns": SessionTraffic(tool_s=2.0, min_turns=4),
    "long": SessionTraffic(tool_s=8.0, min_tokens=16_000),
    "short": SessionTraffic(tool_s=2.0, min_turns=3, max_tokens=16_000),
}
"""Traffics of sessions by name; the sessions of an hour and their rate are those of the
config."""
PRIORITY_STEPS = 32
"""Levels of `RequestAttributes.priority` for each doubling of the attained tokens."""
MEAN_ANSWER = 350
"""Answer that a server expects, in tokens: the mean of the sessions."""


class Hour(NamedTuple):
    """Requests of an hour, or of a part of one."""

    name: str
    workload: Workload
    """Requests with the attributes that a server has: the session is the job, numbered
    by its start; the priority is 32 log2(1 + tokens of earlier turns); the predicted
    length is the prompt and a mean answer; the deadline is 1 s and 1 ms for each token
    of the prompt."""
    job: Int[np.ndarray, " requests"]
    """Job of each request; each request is a job without sessions."""
    remaining: Float[np.ndarray, " requests"]
    """Tokens of the job that are to come, for an oracle."""

    @property
    def traffic(self) -> str:
        """Name without the number."""
        return self.name.rpartition("/")[0]

    @property
    def digest(self) -> str:
        """SHA-256 of times and lengths."""
        w = self.workload
        hash_ = hashlib.sha256()
        for column in (w.arrival, w.prompt, w.output, w.after, w.delay, w.context):
            if column is not None:
                hash_.update(np.ascontiguousarray(column, np.int32).tobytes())
        return hash_.hexdigest()

    def with_oracle(self) -> Workload:
        """Returns the workload with priorities by the remaining tokens of the job."""
        _, rank = np.unique(self.remaining, return_inverse=True)
        priority = rank * 2000 // max(int(rank.max()), 1) - 1000
        attributes = self.workload.attributes
        assert attributes is not None
        return self.workload._replace(
            attributes=attributes._replace(priority=np.asarray(priority, np.int32))
        )


def part_of(names: Sequence[str], shares: Sequence[int]) -> dict[str, str]:
    """Returns the part of each hour of a traffic, by the order of SHA-256 of names.

    Args:
      names: names of the hours.
      shares: numbers of hours of the three parts.
    """
    order = sorted(names, key=lambda x: hashlib.sha256(x.encode()).hexdigest())
    parts = [part for part, n in zip(PARTS, shares, strict=True) for _ in range(n)]
    return dict(zip(order, parts, strict=True))


@functools.cache
def _read_sessions() -> list[list[int]]:
    return json.loads(_SESSIONS.read_text())["sessions"]


def _make_hour(
    name: str,
    arrival_s: Float[np.ndarray, " requests"],
    turns: Int[np.ndarray, "requests 4"],
    delay_s: Float[np.ndarray, " requests"],
) -> Hour:
    """Makes an hour of turns with columns job, turn, new tokens and answer."""
    job, turn, new, output = turns.T
    tokens = new + output
    num = job.size
    before = np.array([tokens[:i][job[:i] == job[i]].sum() for i in range(num)])
    total = np.bincount(job, tokens)[job]
    prompt = before + new
    priority = np.minimum(np.round(PRIORITY_STEPS * np.log2(1 + before)), 1000)
    columns = (np.zeros(num), priority, 1000 + prompt, job, prompt + MEAN_ANSWER)
    workload = make_workload(
        arrival_s,
        prompt,
        output,
        attributes=RequestAttributes(*(np.asarray(x, np.int32) for x in columns)),
        after=np.where(turn > 0, np.arange(num) - 1, -1)[:, None],
        delay_s=delay_s,
        chain=job,
    )
    return Hour(name, workload, job, total - before)


def read_session_hour(
    name: str, traffic: SessionTraffic, *, num_jobs: int, rate: float
) -> Hour:
    """Reads the sessions of an hour; the hours of a traffic have different ones.

    Raises:
      ValueError: there are too few sessions for the number at the end of the name.
    """
    chosen = [
        (hashlib.sha256(f"{index}".encode()).hexdigest(), session)
        for index, session in enumerate(_read_sessions())
        if len(session) >= 2 * traffic.min_turns
        and traffic.min_tokens <= sum(session) <= traffic.max_tokens
    ]
    index = int(name.rpartition("/")[2])
    sessions = [x for _, x in sorted(chosen)][index * num_jobs : (index + 1) * num_jobs]
    if len(sessions) < num_jobs:
        raise ValueError(f"{name}: there are no {index + 1} times {num_jobs} sessions")
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    rng = np.random.default_rng(seed)
    start_s = np.cumsum(rng.exponential(1.0, num_jobs)) / rate
    turns = np.array(
        [
            (job, k, session[2 * k], max(session[2 * k + 1], 1))
            for job, session in enumerate(sessions)
            for k in range(len(session) // 2)
        ]
    )
    middle = np.log(traffic.tool_s) - _TOOL_SIGMA**2 / 2
    tool_s = rng.lognormal(middle, _TOOL_SIGMA, len(turns))
    return _make_hour(
        name, start_s[turns[:, 0]], turns, np.where(turns[:, 1] > 0, tool_s, 0.0)
    )


_read_recording = functools.cache(functools.partial(read_recording, skip_empty=True))


def read_recorded_hour(
    name: str, path: Path, *, num_requests: int, rate: float
) -> Hour:
    """Reads consecutive requests of a recording, at a mean rate per second.

    Raises:
      ValueError: there are too few requests for the number at the end of the name.
    """
    recording = _read_recording(path)
    index = int(name.rpartition("/")[2])
    rows = slice(index * num_requests, (index + 1) * num_requests)
    prompt = recording.prompt[rows].astype(np.int64)
    if prompt.size < num_requests:
        raise ValueError(f"{path}: has no {index + 1} times {num_requests} requests")
    arrival_s = recording.arrival_s[rows] - recording.arrival_s[rows][0]
    arrival_s *= (num_requests - 1) / rate / max(float(arrival_s[-1]), 1e-9)
    turn = np.zeros(num_requests, np.int64)
    output = recording.output[rows].astype(np.int64)
    turns = np.stack([np.arange(num_requests), turn, prompt, output], axis=1)
    return _make_hour(name, arrival_s, turns, np.zeros(num_requests))


def find_trace(trace: str) -> Path | None:
    """Returns the path of a recorded trace, or None if it is absent."""
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        return None
    stems = (Path(folder) / "traces" / f"{trace}{x}" for x in (".csv", ".jsonl"))
    return next((path for path in stems if path.is_file()), None)


class HourSplit:
    """Hours by part; test hours cannot be read before the search has ended."""

    def __init__(
        self,
        parts: dict[str, str],
        read: Callable[[str], Hour],
        digests: dict[str, str],
    ) -> None:
        """Makes a split.

        Args:
          parts: part of each hour by name.
          read: reads an hour.
          digests: committed SHA-256 of contents; hours without one are not checked.
        """
        self.parts = parts
        self._read = read
        self._digests = digests
        self.search_ended = False
        self.names_read: list[str] = []
        """Names of the hours in the order in which they were first read."""
        self.num_early = 0
        """Test hours read before the end of the search."""
        self._hours: dict[str, Hour] = {}

    def hours(self, part: str) -> list[Hour]:
        """Returns the hours of a part.

        Raises:
          RuntimeError: it is the test, and the search has not ended.
          ValueError: the contents of an hour differ from their committed SHA-256.
        """
        if part == "test" and not self.search_ended:
            raise RuntimeError(
                "test hours must not be read before the search has ended"
            )
        names = [name for name, its_part in self.parts.items() if its_part == part]
        return [self.hour(name) for name in names]

    def hour(self, name: str) -> Hour:
        """Reads an hour, once."""
        if name not in self._hours:
            self.names_read.append(name)
            self.num_early += self.parts[name] == "test" and not self.search_ended
            hour = self._read(name)
            digest = self._digests.get(name, hour.digest)
            if digest != hour.digest:
                raise ValueError(f"{name}: SHA-256 {hour.digest} must be {digest}")
            self._hours[name] = hour
        return self._hours[name]
