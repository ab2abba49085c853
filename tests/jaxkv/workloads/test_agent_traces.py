"""Agent sessions: turns, sub-agents and waits of Weka's format."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, SimulationMember, simulate, stack
from jaxkv.workloads import Recording, cached_tokens, read_recording


def request(t: float, ids: list[Any], **more: Any) -> dict[str, Any]:
    tokens = 64 * len(ids) + 5
    return {"t": t, "type": "n", "in": tokens, "out": 9, "hash_ids": ids} | more


def subagent(t: float, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {"t": t, "type": "subagent", "agent_id": "a", "status": "completed"}
    return fields | {"requests": [*requests]} | more


def session(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {"id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return fields | {"requests": [*requests]} | more


def write(folder: Path, *sessions: dict[str, Any], indent: int | None = None) -> Path:
    path = folder / "sessions.jsonl"
    path.write_text("\n".join(json.dumps(x, indent=indent) for x in sessions))
    return path


def waits(recording: Recording) -> list[list[int]]:
    """Returns the requests that each request waits for."""
    assert recording.after is not None
    return [[x for x in row if x >= 0] for row in recording.after.tolist()]


TURNS = (
    request(0.0, [1, 2], api_time=4.0, think_time=0.0),
    request(10.0, [1, 2, 3], api_time=2.5, think_time=6.25),
    request(20.0, [1, 2, 3, 4]),
)
INNER = (
    request(0.0, [9], api_time=3.0, think_time=0.0),
    request(5.0, [9, 10], api_time=4.0, think_time=2.0),
)


def test_turns_wait_for_answers_and_think(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path, session(*TURNS)))
    assert recording.arrival_s.tolist() == [0, 10, 20]
    assert recording.prompt.tolist() == [133, 197, 261]
    assert waits(recording) == [[], [0], [1]]
    # The recorded think time, or else the time since the answer.
    assert recording.delay_s is not None
    assert recording.delay_s.tolist() == [0, 6.25, 7.5]
    assert recording.chunk_tokens == 64
    assert cached_tokens(recording).tolist() == [0, 128, 192]


@pytest.mark.parametrize("basis", ["start", "end", "session"])
def test_subagents_are_joined(tmp_path: Path, basis: str) -> None:
    """Markers have the time of the start or end; inner times have two bases."""
    inner = [one | {"t": one["t"] + 4.5 * (basis == "session")} for one in INNER]
    agents = [
        subagent(13.5 if basis == "end" else 4.5, *inner, duration_ms=9000),
        subagent(4.6, inner[0] | {"t": 4.6 * (basis == "session")}),
    ]
    turns = [TURNS[0], *agents, request(16.0, [1, 2, 3], think_time=12.0), TURNS[2]]
    recording = read_recording(write(tmp_path, session(*turns)))
    assert recording.arrival_s == pytest.approx([0, 4.5, 4.6, 9.5, 16, 20])
    assert waits(recording) == [[], [0], [0], [1], [3, 2], [4]]
    assert recording.delay_s is not None
    # 0.5 s after the answer; think time; 2.5 s after the last answer of a sub-agent.
    assert recording.delay_s[1] == pytest.approx(0.5)
    assert recording.delay_s[3] == pytest.approx(2.0)
    assert recording.delay_s[4] == pytest.approx(2.5)
    assert recording.session is not None
    assert not recording.session.any()


def test_agents_in_the_background_are_not_waited_for(tmp_path: Path) -> None:
    agent = subagent(4.5, *INNER, status="async_launched", duration_ms=None)
    recording = read_recording(write(tmp_path, session(TURNS[0], agent, *TURNS[1:])))
    assert waits(recording) == [[], [0], [1], [0], [3]]


def test_overlapping_requests_fan_out_and_in(tmp_path: Path) -> None:
    requests = (
        request(0.0, [1, 2, 3], api_time=1.0),
        request(5.0, [1, 2, 50], api_time=10.0),
        request(6.0, [1, 2, 60], api_time=5.0),
        request(20.0, [1, 2, 3, 4], api_time=1.0, think_time=5.0),
    )
    recording = read_recording(write(tmp_path, session(*requests)))
    assert waits(recording) == [[], [0], [0], [2, 1]]
    assert recording.delay_s is not None
    assert recording.delay_s.tolist() == [0, 4, 5, 5]


def test_sessions_have_their_own_ids_and_starts(tmp_path: Path) -> None:
    local = session(*TURNS), session(*TURNS[:2])
    for paths in ("lines", "folder", "one"):
        if paths == "folder":
            path = tmp_path / "folder"
            path.mkdir()
            for i, entry in enumerate(local):
                (path / f"trace_{i}.json").write_text(json.dumps(entry, indent=1))
        elif paths == "lines":
            path = write(tmp_path, *local)
        else:
            path = tmp_path / "list.json"
            path.write_text(json.dumps(local))
        recording = read_recording(path)
        assert recording.session is not None
        assert recording.session.tolist() == [0, 1, 0, 1, 0]
        assert waits(recording) == [[], [], [0], [1], [2]]
        assert cached_tokens(recording).tolist() == [0, 0, 128, 128, 192]
    moved = recording.start_sessions(np.array([30.0, 5.0]))
    assert moved.arrival_s.tolist() == [5, 15, 30, 40, 50]
    assert moved.session is not None
    assert moved.session.tolist() == [1, 1, 0, 0, 0]
    assert waits(moved) == [[], [0], [], [2], [3]]
    with pytest.raises(ValueError, match="start_s must have 2 times of at least 0 s"):
        recording.start_sessions(np.zeros(3))
    shared = [entry | {"hash_id_scope": "global"} for entry in local]
    recording = read_recording(write(tmp_path, *shared))
    assert cached_tokens(recording).tolist() == [0, 128, 128, 192, 192]


def test_requests_without_output_are_refused_or_counted(tmp_path: Path) -> None:
    path = write(tmp_path, session(TURNS[0], request(5.0, [1], out=0), *TURNS[1:]))
    line = r"line 1: requests\[1\]: the output has 0 tokens"
    with pytest.raises(ValueError, match=line):
        read_recording(path)
    recording = read_recording(path, skip_empty=True)
    assert recording.num_empty == 1
    assert waits(recording) == [[], [0], [1]]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"block_size": 0}, "line 2: block_size=0 must be in [1, "),
        ({"block_size": 32}, "line 2: block_size=32 must be 64, as in the sessions"),
        ({"hash_id_scope": "x"}, "line 2: hash_id_scope='x' must be 'local' or"),
        ({"requests": {}}, "line 2: requests is not a list"),
        ({"requests": [3]}, "line 2: requests[0] is not an object"),
        ({"requests": [request(-1.0, [])]}, "requests[0]: t=-1.0 is not a time"),
        (
            {"requests": [subagent(0.0, request(0.0, [1], **{"in": 1.5}))]},
            "requests[0].requests[0]: in=1.5 must be in [1, ",
        ),
        ({"requests": [request(0, ["a"])]}, "hash_ids is not a list of whole"),
        ({"requests": [request(0, [2**32])]}, "hash_ids must be in [0, 2^32)"),
        (
            {"requests": [request(0, [1, 2], **{"in": 64})]},
            "2 hash_ids for 64 tokens, 64 to each",
        ),
        ({"requests": [request(0, [1], api_time="x")]}, "api_time='x' is not a time"),
    ],
)
def test_impossible_sessions_are_named(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    path = write(tmp_path, session(*TURNS), session(*TURNS) | change)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        read_recording(path)
    assert str(caught.value).startswith(f"{path}: line 2: ")
    assert "\n" not in str(caught.value)


def test_files_without_sessions_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no requests of agent sessions"):
        read_recording(write(tmp_path, session()))
    with pytest.raises(ValueError, match="holds no requests of agent sessions"):
        read_recording(tmp_path / "..", skip_empty=True)
    with pytest.raises(ValueError, match="has agent sessions, whose units are known"):
        read_recording(write(tmp_path, session(*TURNS)), time_unit="s")


def test_sessions_run_in_a_closed_loop(tmp_path: Path) -> None:
    """Each turn is sent a delay after the answers that it waits for."""
    turns = [TURNS[0], subagent(4.5, *INNER, duration_ms=9000), *TURNS[1:]]
    recording = read_recording(write(tmp_path, session(*turns), session(*TURNS)))
    member = SimulationMember(
        recording.workload(cache_tokens=10_000),
        Capacity.of(num_pages=999),
        fcfs(),
        lambda work: jnp.float32(0.5),
    )
    served = simulate(stack([member]), max_slots=8)
    finish_s = served.finish_s[0]
    arrival_s = served.arrival_s[0]
    assert recording.delay_s is not None
    for i, after in enumerate(waits(recording)):
        sent_s = max(finish_s[after]) + recording.delay_s[i] if after else 0.0
        assert arrival_s[i] == pytest.approx(sent_s, abs=1e-5)
    assert arrival_s[-1] != pytest.approx(recording.arrival_s[-1])
    load = recording.workload(at_recorded_times=True)
    assert load.after is None
    assert load.arrival[-1].tolist() == [20, 0]
    with pytest.raises(ValueError, match="clients=2 must be None"):
        recording.workload(clients=2)


def test_ids_after_other_ids_are_doubted(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path, session(request(0, [1, 2]))))
    assert recording.doubts == ()
    calls = request(0, [1, 2]), request(9, [3, 2])
    (doubt,) = read_recording(write(tmp_path, session(*calls))).doubts
    assert doubt.startswith(
        "request 2: a chunk follows another chunk than in request 1"
    )
