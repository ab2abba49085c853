"""Runs an incident again: as the server did, and under other policies.

`IncidentEngine.replay` repeats the calls of the server with their clocks. All arrays
follow, so the tokens are those of the server. `IncidentEngine.compare` continues the
same state under several policies. The time of a call is then a line in its tokens, fit
to the recorded calls, also for the server's own policy, so that policies are compared
under one clock. Times are those at the start of the call that emits a token.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.clock import from_seconds, to_seconds
from jaxkv.engine import (
    EngineState,
    Requests,
    Sequences,
    StepInfo,
    branch,
    cancel,
    drain,
    load_state,
    run_steps,
    submit,
    widen,
)
from jaxkv.ledger import EVENTS, PROGRESS
from jaxkv.memory import Eviction
from jaxkv.scheduling import Policy
from jaxkv.server.incidents import STATE_FOLDER, Incident, IncidentRequest
from jaxkv.serving import Engine, make_requests

type _Name = tuple[int, int]
"""Request id and sample."""


class CallTimeFit(NamedTuple):
    """Time of a call: a constant and a time per token fed, in s."""

    call_s: float
    row_s: float

    def __call__(self, info: StepInfo) -> Float[Array, ""]:
        """Returns the seconds of a call."""
        rows = jnp.sum(info.num_rows, dtype=jnp.int32).astype(jnp.float32)
        return self.call_s + self.row_s * rows


class ReplayAgreement(NamedTuple):
    """Result of a replay of the server's calls."""

    num_calls: int
    num_equal_calls: int
    """Calls that fed as many tokens in each step as the server's."""
    num_answers: int
    """Answers that ended in the replay and that the server returned."""
    num_equal_answers: int
    """Answers with the tokens of the server; where tokens are masked, its lengths."""


class ReplayTable(NamedTuple):
    """Times of the requests of an incident under several policies."""

    policies: list[str]
    """Names; the first is the server's own policy."""
    request_ids: list[int]
    prompt_tokens: list[int]
    answer_tokens: list[int]
    """Tokens of all sequences of the answer."""
    ttft_s: Float[np.ndarray, "policies requests"]
    """Time to first token; NaN if there was none."""
    latency_s: Float[np.ndarray, "policies requests"]
    """Time to the last token; NaN if the request did not end."""
    tpot_s: Float[np.ndarray, "policies requests"]
    """Time per output token after the first; NaN if the request did not end."""
    num_preempted: Int[np.ndarray, " policies"]
    """Preemptions."""
    same_tokens: list[bool]
    """True if all answers that ended are those under the first policy."""
    call_time: CallTimeFit


class IncidentEngine:
    """An engine that runs an incident again.

    Args:
      engine: engine of the same model and bounds; its state is not used.
      incident: the incident.
    """

    def __init__(self, engine: Engine, incident: Incident):
        self.incident = incident
        self.config = engine.config
        self._engine = engine
        self._rules = engine.rules
        self._options: dict[str, Any] = {
            "forward": engine.static["forward"],
            "logits_fn": engine.rules.logits_fn,
            "speculation": engine.rules.speculation,
        }
        self._cancel = jax.jit(cancel)
        self._drain = jax.jit(drain)

    def load(self) -> EngineState:
        """Returns the state of the incident.

        Raises:
          ValueError: it is damaged, or of another model or configuration.
        """
        shapes = jax.eval_shape(lambda: self._engine.state)
        folder = self.incident.folder / STATE_FOLDER
        return load_state(folder, self.config, shapes.pages, shapes.memory)

    def replay(self) -> ReplayAgreement:
        """Repeats the calls of the server under its own policy."""
        incident = self.incident
        state = self.load()
        cancelled = {tuple(x) for call in incident.calls for x in call.cancels}
        ended = {
            (x.request_id, sample): num
            for x in incident.outcomes
            for sample, num in zip(x.samples, x.num_tokens, strict=True)
            if not {(x.request_id, sample), (x.request_id, -1)} & cancelled
        }
        limits = {} if incident.has_tokens else ended
        state = _limit_state(state, limits)
        by_id = {x.request_id: x for x in incident.requests}
        take = jax.jit(functools.partial(submit, config=self.config))
        answers: dict[_Name, list[int]] = {}
        num_equal = 0
        for call in incident.calls:
            if call.request_ids:
                batch = [by_id[i] for i in call.request_ids]
                state, _ = take(state, self._pack(batch, limits))
            state, info = self._engine.run_steps(
                state, call.now_s, may_draft=call.may_draft
            )
            num_equal += np.asarray(info.num_rows).sum(axis=1).tolist() == call.num_rows
            if call.cancels:
                names = np.full((self.config.max_sequences, 2), -1, np.int32)
                names[: len(call.cancels)] = call.cancels
                state = self._cancel(state, *names.T, eviction=self._rules.eviction)
            if call.has_drained:
                answers |= _answers(state)
                state, _ = self._drain(state)
        answers |= _answers(state)
        expected = {
            (x.request_id, sample): (x.num_tokens[i], x.tokens and x.tokens[i])
            for x in incident.outcomes
            for i, sample in enumerate(x.samples)
            if (x.request_id, sample) in ended and (x.request_id, sample) in answers
        }
        num_same = sum(
            answers[name] == tokens if tokens is not None else len(answers[name]) == num
            for name, (num, tokens) in expected.items()
        )
        return ReplayAgreement(len(incident.calls), num_equal, len(expected), num_same)

    def compare(
        self,
        policies: Mapping[str, Policy],
        evictions: Mapping[str, Eviction | None] = MappingProxyType({}),
    ) -> ReplayTable:
        """Continues the state under each policy, with the requests that followed.

        A request that the client or a stop string ended has the tokens that the server
        returned. Requests that are open at the end of the last call have no latency.

        Args:
          policies: policies by name, that of the server first.
          evictions: rules of eviction by the name of the policy; that of the server
            for policies without an entry.
        """
        incident = self.incident
        state = self.load()
        num_rows = sum(x.sampling.num_sequences for x in incident.requests)
        state, config = widen(state, self.config, num_rows)
        limits = {
            (x.request_id, sample): max(num, 1)
            for x in incident.outcomes
            for sample, num in zip(x.samples, x.num_tokens, strict=True)
        }
        state = _limit_state(state, limits)
        take = jax.jit(functools.partial(submit, config=config))
        width = max(self.config.submit_width, self.config.max_slots)
        batch: list[IncidentRequest] = []
        later = sorted(incident.requests, key=lambda x: x.arrival_s)
        for request in [*later, None]:
            rows = sum(x.sampling.num_sequences for x in batch)
            extra = 0 if request is None else request.sampling.num_sequences
            if batch and (request is None or rows + extra > width):
                state, taken = take(state, self._pack(batch, limits))
                assert np.asarray(taken)[:rows].all()
                batch = []
            if request is not None:
                batch.append(request)
        call_time = fit_call_time(incident)
        run = functools.partial(run_steps, config=config, **self._options)
        num_calls = len(incident.calls) * 3 // 2 + 16
        program = functools.partial(
            branch, run=run, call_time=call_time, num_calls=num_calls, keep_pages=False
        )
        rules = [evictions.get(name, self._rules.eviction) for name in policies]
        now = from_seconds(incident.calls[0].now_s)
        ends, infos = jax.tree.map(
            np.asarray,
            jax.jit(program)(
                self._engine.params,
                state,
                now,
                policies=[*policies.values()],
                evictions=rules,
            ),
        )
        return _tabulate([*policies], state, ends, infos, call_time)

    def _pack(
        self, batch: Sequence[IncidentRequest], limits: Mapping[_Name, int]
    ) -> Requests:
        """Makes the arrays of requests, as the server did."""
        asks = [x.sampling for x in batch]
        if not self.incident.has_tokens:
            asks = [dataclasses.replace(ask, ignore_eos=True) for ask in asks]
        requests = make_requests(
            [x.prompt for x in batch],
            asks,
            config=self.config,
            request_ids=[x.request_id for x in batch],
            key_ids=[x.key_id for x in batch],
            arrivals_s=[x.arrival_s for x in batch],
            attributes=[x.attributes for x in batch],
            eos_ids=tuple(self._engine.eos_ids) if self.incident.has_tokens else (),
            width=max(self.config.submit_width, self.config.max_slots),
        )
        return _set_limits(requests, limits)


def fit_call_time(incident: Incident) -> CallTimeFit:
    """Fits a line to the times between calls of a busy server, by its tokens fed."""
    now_s = np.array([call.now_s for call in incident.calls])
    rows = np.array([sum(call.num_rows) for call in incident.calls], float)
    duration_s = np.diff(now_s)
    rows = rows[:-1]
    if not (rows > 0).any():
        return CallTimeFit(0.01, 0.0)
    # Pauses of an idle server are no work.
    busy = (rows > 0) & (duration_s < 5 * np.median(duration_s[rows > 0]))
    x, y = rows[busy], duration_s[busy]
    slope = 0.0
    if np.ptp(x) > 0:
        slope = max(float(np.polyfit(x, y, 1)[0]), 0.0)
    start = float(np.mean(y) - slope * np.mean(x))
    if start < 0:  # a line through the origin
        return CallTimeFit(0.0, float(np.mean(y) / np.mean(x)))
    return CallTimeFit(start, slope)


def _set_limits[T: (Requests, Sequences)](rows: T, lengths: Mapping[_Name, int]) -> T:
    """Ends sequences at the lengths of known answers."""
    limit = np.array(rows.limit)
    prompt = np.asarray(rows.prompt_length)
    names = zip(
        np.asarray(rows.request_id).tolist(),
        np.asarray(rows.params.sample).tolist(),
        strict=True,
    )
    for row, name in enumerate(names):
        if (num := lengths.get(name)) is not None:
            limit[row] = min(prompt[row] + num, limit[row])
    return rows._replace(  # ty: ignore[invalid-explicit-return]
        limit=jnp.asarray(limit, jnp.int32)
    )


def _limit_state(state: EngineState, lengths: Mapping[_Name, int]) -> EngineState:
    """Ends the sequences of a state at the lengths of known answers."""
    return state._replace(sequences=_set_limits(state.sequences, lengths))


def _answers(state: EngineState) -> dict[_Name, list[int]]:
    """Returns the tokens of all sequences of a state that have ended."""
    s = jax.tree.map(np.asarray, state.sequences)
    progress = PROGRESS.unpack(np.asarray(state.ledger.progress))
    events = EVENTS.unpack(np.asarray(state.ledger.events))
    rows = np.flatnonzero((progress.num_tokens > 0) & (events.finish_s > 0))
    return {
        (int(s.request_id[row]), int(s.params.sample[row])): s.tokens[
            row, s.prompt_length[row] : progress.num_tokens[row]
        ].tolist()
        for row in rows.tolist()
    }


def _tabulate(
    names: list[str],
    state: EngineState,
    ends: EngineState,
    infos: StepInfo,
    call_time: CallTimeFit,
) -> ReplayTable:
    """Reads the times of requests that had not ended in the first state."""
    events: Any = EVENTS.unpack(ends.ledger.events)
    progress: Any = PROGRESS.unpack(ends.ledger.progress)
    s: Any = ends.sequences
    started = EVENTS.unpack(np.asarray(state.ledger.events))
    used = np.asarray(PROGRESS.read(state.ledger.progress, "num_tokens")) > 0
    open_rows = np.flatnonzero(used & (started.finish_s == 0))
    by_request: dict[int, list[int]] = {}
    for row in open_rows.tolist():
        by_request.setdefault(int(s.request_id[0, row]), []).append(row)

    def seconds(whole: np.ndarray, micros: np.ndarray) -> np.ndarray:
        # Events have the second plus 1.
        time = to_seconds(np.stack([whole - 1, micros], axis=-1))
        return np.where(whole > 0, time, np.nan)

    arrival_s = to_seconds(s.arrival)
    first_s = seconds(events.first_s, events.first_us) - arrival_s
    finish_s = seconds(events.finish_s, events.finish_us) - arrival_s
    num_tokens = progress.num_tokens - s.prompt_length
    groups = [*by_request.values()]
    ttft_s = np.stack([first_s[:, rows].min(axis=1) for rows in groups], axis=1)
    latency_s = np.stack([finish_s[:, rows].max(axis=1) for rows in groups], axis=1)
    longest = np.stack([num_tokens[:, rows].max(axis=1) for rows in groups], axis=1)
    # Answers end at different calls, so only tokens that both have are compared.
    place = np.arange(s.tokens.shape[-1])
    has_token = (place >= s.prompt_length[..., None]) & (
        place < (s.prompt_length + num_tokens)[..., None]
    )
    has_ended = (events.finish_s > 0) & (events.finish_s[:1] > 0)
    same = (s.tokens == s.tokens[:1]) | ~has_token
    same = same.all(axis=-1) & (num_tokens == num_tokens[:1])
    return ReplayTable(
        policies=names,
        request_ids=[*by_request],
        prompt_tokens=[int(s.prompt_length[0, rows[0]]) for rows in groups],
        answer_tokens=[int(num_tokens[0, rows].sum()) for rows in groups],
        ttft_s=ttft_s,
        latency_s=latency_s,
        tpot_s=(latency_s - ttft_s) / np.maximum(longest - 1, 1),
        num_preempted=np.asarray(infos.num_preempted).sum(axis=1),
        same_tokens=[
            bool(same[i, open_rows][has_ended[i, open_rows]].all())
            for i in range(len(names))
        ],
        call_time=call_time,
    )
