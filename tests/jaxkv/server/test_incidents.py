"""Incidents of an engine: recorded, written, read, and run again."""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling, scheduling
from jaxkv.memory import count_prefix_faults
from jaxkv.server import (
    IncidentEngine,
    IncidentObjectives,
    IncidentRecorder,
    ModelOrigin,
    incident_recorder,
    read_incident,
)
from jaxkv.server.incident_replay import CallTimeFit, fit_call_time
from jaxkv.server.incidents import Incident, IncidentCall
from jaxkv.server.token_masks import TokenMask, withhold_tokens
from tests.support import engines
from tests.support.folders import TOKENIZED

BOUNDS: Any = vars(engines.SERVED) | {"prefix_cache": True, "queue_head": 8}
ORIGIN = ModelOrigin("tiny", {}, {}, {}, "fcfs")
FCFS = scheduling.fcfs()
BREACHED = IncidentObjectives(ttft_s=1e-6)


def make_engine() -> jaxkv.Engine:
    return jaxkv.Engine.load(TOKENIZED, **BOUNDS)


def serve(
    engine: jaxkv.Engine, recorder: IncidentRecorder | None, seed: int = 0
) -> dict[int, jaxkv.Completion]:
    """Serves requests that come between calls; one is cancelled, one has 2 answers."""
    rng = np.random.default_rng(seed)
    common = rng.integers(5, 60, 12).tolist()
    done: dict[int, jaxkv.Completion] = {}
    calls = 0
    submitted = 0
    while submitted < 14 or engine.has_pending():
        while submitted < 14 and submitted < 2 * calls + 3:
            prompt = common + rng.integers(5, 60, int(rng.integers(1, 8))).tolist()
            ask = Sampling(
                max_tokens=int(rng.integers(4, 24)), n=1 + submitted % 5 // 4
            )
            if submitted == 7:
                ask = dataclasses.replace(ask, max_tokens=30, ignore_eos=True)
            engine.submit(prompt, ask, request_id=submitted)
            submitted += 1
        if calls == 12:
            engine.cancel(7)
        engine.step()
        events = engine.tracker.events
        if recorder is not None:
            recorder.observe(tuple(events))
        done |= {e.request_id: e.completion for e in events if e.completion}
        events.clear()
        calls += 1
    return done


def record(folder: Path, **options: Any) -> list[Incident]:
    """Records incidents of a served load, and reads them."""
    engine = make_engine()
    recorder = IncidentRecorder(engine, folder, BREACHED, ORIGIN, **options)
    serve(engine, recorder)
    recorder.close()
    return [read_incident(path) for path in sorted(folder.glob("incident-*"))]


@pytest.fixture(scope="module", autouse=True)
def short_intervals() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incident_recorder, "CALLS_BETWEEN", 4)
        patch.setattr(incident_recorder, "CALLS_AFTER", 8)
        yield


@pytest.mark.slow
def test_a_replay_has_the_tokens_of_the_server(tmp_path: Path) -> None:
    incidents = record(tmp_path, keep_prompts=True)
    assert incidents
    runner = IncidentEngine(make_engine(), incidents[0])
    calls = runner.replay()
    assert calls.num_calls == calls.num_equal_calls == len(incidents[0].calls) > 8
    assert calls.num_answers == calls.num_equal_answers > 3
    # Another token in an outcome, or another arrival, is seen.
    outcomes = [*incidents[0].outcomes]
    places = [i for i, x in enumerate(outcomes) if x.request_id == 3]
    tokens = [[x + 1 for x in row] for row in outcomes[places[0]].tokens or []]
    outcomes[places[0]] = outcomes[places[0]]._replace(tokens=tokens)
    runner.incident = incidents[0]._replace(outcomes=outcomes)
    assert runner.replay().num_equal_answers == calls.num_answers - 1
    late = [x._replace(may_draft=True) for x in incidents[0].calls]
    late[2] = late[2]._replace(num_rows=[x + 1 for x in late[2].num_rows])
    runner.incident = incidents[0]._replace(calls=late)
    assert runner.replay().num_equal_calls == calls.num_calls - 1
    # Under another policy other requests gain; the tokens of answers stay.
    runner.incident = incidents[0]
    table = runner.compare({"fcfs": FCFS, "chunked": scheduling.fcfs(chunk_size=2)})
    assert table.same_tokens == [True, True]
    assert np.isfinite(table.latency_s).all()
    assert (table.latency_s[0] != table.latency_s[1]).any()
    lengths = dict(zip(table.request_ids, table.answer_tokens, strict=True))
    for outcome in incidents[0].outcomes:
        if outcome.request_id in lengths:
            assert lengths[outcome.request_id] == max(sum(outcome.num_tokens), 1)


@pytest.mark.slow
def test_without_tokens_the_schedule_is_replayed(tmp_path: Path) -> None:
    incidents = record(tmp_path)
    first = incidents[0]
    assert not first.has_tokens
    assert all(x.tokens is None for x in first.outcomes)
    runner = IncidentEngine(make_engine(), first)
    calls = runner.replay()
    assert calls.num_calls == calls.num_equal_calls
    assert calls.num_answers == calls.num_equal_answers > 3
    # No token of the prompts, in the file or in the state.
    rng = np.random.default_rng(0)
    common = rng.integers(5, 60, 12).tolist()
    text = json.dumps(common)[1:-1]
    assert text not in (first.folder / "incident.json").read_text()
    state = runner.load()
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.pages))
    for array in (state.sequences.tokens, state.prefixes.tokens):  # ty: ignore
        rows = np.lib.stride_tricks.sliding_window_view(np.asarray(array), 4, axis=1)
        assert not (rows == common[:4]).all(axis=-1).any()
    assert int(count_prefix_faults(state.prefixes, state.pool)) == 0  # ty: ignore
    # Prompts with a common prefix still have one of the same length.
    starts = {tuple(x.prompt[:12]) for x in first.requests}
    assert len(starts) == 1
    assert len({tuple(x.prompt[:13]) for x in first.requests}) > 1


def test_masks_keep_common_prefixes_only() -> None:
    mask = TokenMask(50, b"secret")
    first = mask.replace([1, 2, 3, 4])[0]
    second = mask.replace([1, 2, 9, 4])[0]
    assert first[:2] == second[:2]
    assert first[2:] != second[2:]
    assert all(0 <= x < 50 for x in first + second)
    begin, digest = mask.replace([1, 2])
    assert begin + mask.replace([3, 4], digest)[0] == first
    assert TokenMask(50).replace([1] * 9)[0] != TokenMask(50).replace([1] * 9)[0]


def test_a_masked_state_has_no_tokens_of_any_row() -> None:
    config = dataclasses.replace(engines.TIGHT, prefix_cache=True)
    asks = [engines.greedy(i, [7, 8, 9, 10, 11, i], 3) for i in range(4)]
    state = engines.submitted(asks, config)
    dirty = state.sequences._replace(
        tokens=state.sequences.tokens.at[9].set(7),
        top_ids=jnp.ones_like(state.sequences.top_ids),
    )
    masked = withhold_tokens(state._replace(sequences=dirty), TokenMask(61, b"x"))
    tokens = np.asarray(masked.sequences.tokens)
    assert not tokens[9].any()
    assert not np.asarray(masked.sequences.top_ids).any()
    assert (tokens[:4, :5] == tokens[0, :5]).all()
    assert tokens[0, :5].tolist() != [7, 8, 9, 10, 11]
    np.testing.assert_array_equal(masked.ledger.queue, state.ledger.queue)


def test_the_time_of_a_call_is_a_line_through_busy_calls() -> None:
    rows = [8, 16, 4, 0, 12, 20, 6]
    seconds = [0.01 + 0.002 * x for x in rows]
    seconds[3] = 9.0  # a pause
    now_s = np.concatenate([[0.0], np.cumsum(seconds)])
    calls = [
        IncidentCall(float(t), True, [], [], False, [n])
        for t, n in zip(now_s, [*rows, 3], strict=True)
    ]
    fit = fit_call_time(_incident(calls))
    np.testing.assert_allclose((fit.call_s, fit.row_s), (0.01, 0.002), rtol=1e-6)
    assert fit_call_time(_incident(calls[:1])) == CallTimeFit(0.01, 0.0)


def _incident(calls: list[IncidentCall]) -> Incident:
    fields: dict[str, Any] = {**dict.fromkeys(Incident._fields), "calls": calls}
    return Incident(**fields)


@pytest.mark.slow
def test_memory_and_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = list[int]()

    def save(self: Any, state: Any, calls: list, outcomes: list, breach: Any) -> None:
        saved.append(len(calls))

    monkeypatch.setattr(IncidentRecorder, "_write", save)
    engine = make_engine()
    recorder = IncidentRecorder(engine, tmp_path, BREACHED, ORIGIN)
    sizes = collections.Counter[str]()
    plain = recorder.record_call

    def count(call: Any) -> None:
        plain(call)
        sizes["states"] = max(sizes["states"], len(recorder._ring))
        sizes["calls"] = max(sizes["calls"], len(recorder._calls))

    engine.on_dispatch = count
    answers = serve(engine, recorder)
    recorder.close()
    assert engine.on_dispatch is None
    assert sizes["states"] <= incident_recorder.RING_STATES
    limit = 4 * incident_recorder.CALLS_BETWEEN + incident_recorder.CALLS_AFTER
    assert sizes["calls"] <= limit
    assert saved
    assert max(saved) <= limit
    # The answers are those of an engine that records nothing.
    plain_answers = serve(make_engine(), None)
    assert {k: v.tokens for k, v in answers.items() if k != 7} == {
        k: v.tokens for k, v in plain_answers.items() if k != 7
    }


def test_the_oldest_incident_is_deleted(tmp_path: Path) -> None:
    engine = make_engine()
    recorder = IncidentRecorder(engine, tmp_path, BREACHED, ORIGIN, max_incidents=2)
    for i in range(4):
        recorder._write(engine.state, [], [], {"request_id": i})
    names = sorted(path.name[-3:] for path in tmp_path.iterdir())
    assert names == ["002", "003"]
    last = tmp_path / max(x.name for x in tmp_path.iterdir())
    assert read_incident(last).breach == {"request_id": 3}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "incident.json").unlink(), "is no incident"),
        (lambda path: (path / "SHA256SUMS").unlink(), "SHA256SUMS: is missing"),
        (
            lambda path: (path / "incident.json").write_text("{}"),
            "incident.json: is damaged",
        ),
        (
            lambda path: next((path / "state").rglob("*.json")).write_text("x"),
            "is damaged",
        ),
    ],
)
def test_damaged_incidents_are_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    engine = make_engine()
    recorder = IncidentRecorder(engine, tmp_path, BREACHED, ORIGIN)
    recorder._write(engine.state, [], [], {})
    [path] = tmp_path.iterdir()
    damage(path)
    with pytest.raises(ValueError, match=message):
        read_incident(path)
    with pytest.raises(ValueError, match="no such incident"):
        read_incident(tmp_path / "absent")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objectives": IncidentObjectives()}, "must have ttft_s or tpot_s"),
        ({"objectives": IncidentObjectives(ttft_s=0.0)}, r"ttft_s=0.0 must be in"),
        ({"max_incidents": 0}, "max_incidents=0"),
    ],
)
def test_invalid_options_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    objectives = arguments.pop("objectives", BREACHED)
    with pytest.raises(ValueError, match=message):
        IncidentRecorder(make_engine(), tmp_path, objectives, ORIGIN, **arguments)
