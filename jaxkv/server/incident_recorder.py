"""Keeps recent states and calls of a serving engine, and saves them after a breach.

Memory is bounded: `RING_STATES` copies of the state, one every `CALLS_BETWEEN` calls,
and the calls since the oldest of them. So is the disk: at most `max_incidents` folders,
of which the oldest is deleted. A breach is seen when its request is complete; the
incident has the calls from the oldest state up to `CALLS_AFTER` calls after the breach,
or until the engine is idle. Incidents do not overlap.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int32

from jaxkv import validation
from jaxkv.engine import EngineState
from jaxkv.scheduling import RequestAttributes
from jaxkv.server.incidents import (
    INCIDENT_FILE,
    Incident,
    IncidentCall,
    IncidentObjectives,
    IncidentOutcome,
    IncidentRequest,
    JsonObject,
    write_incident,
)
from jaxkv.server.token_masks import TokenMask, withhold_tokens
from jaxkv.serving import (
    Completion,
    DispatchedCall,
    Engine,
    Event,
    RequestRecord,
    check_free_memory,
)

RING_STATES = 3
"""Copies of the state."""
CALLS_BETWEEN = 64
"""Calls between two copies."""
CALLS_AFTER = 32
"""Calls that are recorded after a breach."""


class ModelOrigin(NamedTuple):
    """How the model of an engine was loaded."""

    model: str
    """Folder of the model, or name of a bundled one."""
    digests: dict[str, str]
    """SHA-256 of its files."""
    loading: JsonObject
    """Options by which it was loaded."""
    bounds: JsonObject
    """Bounds of the engine."""
    policy: str
    """Name of the scheduling policy."""


class _Checkpoint(NamedTuple):
    state: EngineState
    num_calls: int
    """Calls before the state."""


class _CallRecord(NamedTuple):
    fields: JsonObject
    """Fields of `IncidentCall`, except the rows."""
    requests: list[IncidentRequest]
    num_rows: Int32[Array, "steps slots"]
    """Rows of each step and slot, on the device until the incident is saved."""


class IncidentRecorder:
    """Records an engine; all methods are called by the thread that runs it."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        objectives: IncidentObjectives,
        origin: ModelOrigin,
        *,
        keep_prompts: bool = False,
        max_incidents: int = 8,
    ):
        """Starts to record.

        Args:
          engine: the engine, with one device and no requests.
          folder: folder of the incidents; missing parents are made.
          objectives: objectives, at least one.
          origin: how the model was loaded, for a replay.
          keep_prompts: True to keep the tokens of prompts and answers.
          max_incidents: largest number of incidents in the folder.

        Raises:
          ValueError: there is no objective, a number is out of range, the tokens of
            drafts or beams cannot be masked, or the copies of the state do not fit
            into memory.
        """
        config = engine.config
        if config.max_grammars:
            raise ValueError(f"{config.max_grammars=} must be 0: incidents have none")
        if objectives == IncidentObjectives():
            raise ValueError("objectives must have ttft_s or tpot_s")
        for name, value in objectives._asdict().items():
            if value is not None and not 0 < value < 1e6:
                raise ValueError(f"{name}={value} must be in (0, 1e6)")
        if not keep_prompts and (config.max_drafts or config.max_beams):
            raise ValueError(
                "the tokens of drafts and beams cannot be masked; keep_prompts must be "
                "True with speculation or beam search"
            )
        if config.max_swap_pages:
            raise ValueError(
                f"max_swap_pages={config.max_swap_pages} must be 0 to keep incidents"
            )
        validation.integer("max_incidents", max_incidents, low=1)
        check_free_memory(
            [engine.state] * RING_STATES, f"{RING_STATES} copies of the engine's state"
        )
        self.engine = engine
        self.folder = folder
        self.num_saved = 0
        """Incidents written so far."""
        self._objectives = objectives
        self._origin = origin
        self._keep_prompts = keep_prompts
        self._max_incidents = max_incidents
        self._ring = collections.deque[_Checkpoint](maxlen=RING_STATES)
        num = (RING_STATES + 1) * CALLS_BETWEEN + CALLS_AFTER
        self._calls = collections.deque[_CallRecord](maxlen=num)
        self._num_calls = 0
        self._outcomes = collections.deque[IncidentOutcome](
            maxlen=num * config.max_sequences
        )
        self._breach: JsonObject | None = None
        self._calls_left = 0
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "jaxkv-incident")
        self._writing: concurrent.futures.Future | None = None
        engine.on_dispatch = self.record_call

    def record_call(self, call: DispatchedCall) -> None:
        """Records a dispatched call, and copies the state every `CALLS_BETWEEN` calls.

        A breach that is being recorded is saved after its last call.
        """
        cancels = [] if call.cancels is None else np.stack(call.cancels, axis=1)
        fields = {
            "now_s": call.now_s,
            "may_draft": call.may_draft,
            "request_ids": [record.request_id for record in call.batch],
            "cancels": [(int(a), int(b)) for a, b in cancels if a >= 0],
            "has_drained": call.drained is not None,
        }
        requests = [self._request_of(record) for record in call.batch]
        self._calls.append(_CallRecord(fields, requests, call.info.num_rows))
        self._num_calls += 1
        if self._breach is not None:
            self._calls_left -= 1
            if self._calls_left <= 0:
                self._save()
        last = self._ring[-1].num_calls if self._ring else -CALLS_BETWEEN
        if self._breach is None and self._num_calls - last >= CALLS_BETWEEN:
            state = jax.device_put(self.engine.state, may_alias=False)
            self._ring.append(_Checkpoint(state, self._num_calls))

    def observe(self, events: Iterable[Event]) -> None:
        """Reads completions, and begins an incident at the first breach."""
        for event in events:
            done = event.completion
            if done is None:
                continue
            self._outcomes.append(self._outcome_of(done))
            if self._breach is None and self._ring:
                self._breach = self._breach_of(done)
                self._calls_left = CALLS_AFTER
        if self._breach is not None and not self.engine.tracker.records:
            self._save()

    def close(self) -> None:
        """Saves an incident that is being recorded, and waits until it is written."""
        if self._breach is not None:
            self._save()
        self._writer.shutdown()
        self.engine.on_dispatch = None

    def _breach_of(self, done: Completion) -> JsonObject | None:
        """Returns the objective that a request has breached, or None."""
        if done.first_token_s is None:
            return None
        num = max(len(answer.tokens) for answer in done.answers)
        seconds = {
            "ttft_s": done.first_token_s - done.arrival_s,
            "tpot_s": (done.finish_s - done.first_token_s) / max(num - 1, 1),
        }
        for name, limit in self._objectives._asdict().items():
            if limit is not None and seconds[name] > limit:
                return {
                    "request_id": done.request_id,
                    "objective": name,
                    "limit_s": limit,
                    "measured_s": seconds[name],
                }
        return None

    def _request_of(self, record: RequestRecord) -> IncidentRequest:
        key_id = record.request_id if record.key_id is None else record.key_id
        return IncidentRequest(
            request_id=record.request_id,
            key_id=key_id,
            arrival_s=record.arrival_s,
            prompt=record.prompt,
            sampling=record.sampling,
            attributes=record.attributes or RequestAttributes(),
            end_tokens=[] if record.sampling.ignore_eos else [*self.engine.eos_ids],
        )

    def _outcome_of(self, done: Completion) -> IncidentOutcome:
        answers = done.answers
        return IncidentOutcome(
            request_id=done.request_id,
            arrival_s=done.arrival_s,
            first_token_s=done.first_token_s,
            finish_s=done.finish_s,
            reasons=[answer.reason for answer in answers],
            samples=[answer.sample for answer in answers],
            num_tokens=[len(answer.tokens) for answer in answers],
            tokens=[answer.tokens for answer in answers],
        )

    def _save(self) -> None:
        """Hands the incident to the writer, and begins anew."""
        breach = self._breach
        assert breach is not None
        checkpoint = self._ring[0]
        num = self._num_calls - checkpoint.num_calls
        calls = list(self._calls)[len(self._calls) - num :]
        outcomes = list(self._outcomes)
        self._breach = None
        self._ring.clear()
        self._calls.clear()
        self._outcomes.clear()
        if self._writing is None or self._writing.done():
            self._writing = self._writer.submit(
                self._write, checkpoint.state, calls, outcomes, breach
            )

    def _write(
        self,
        state: EngineState,
        calls: list[_CallRecord],
        outcomes: list[IncidentOutcome],
        breach: JsonObject,
    ) -> None:
        """Writes an incident, and deletes the oldest ones above the bound."""
        now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"incident-{now}-{self.num_saved:03d}"
        requests = [request for call in calls for request in call.requests]
        if not self._keep_prompts:
            size = self.engine._vocab_size or 2**16
            mask = TokenMask(size)
            state = withhold_tokens(state, mask)
            requests = [_mask_request(request, mask) for request in requests]
            outcomes = [x._replace(tokens=None) for x in outcomes]
        try:
            write_incident(
                Incident(
                    folder=self.folder / name,
                    **self._origin._asdict(),
                    objectives=self._objectives,
                    breach=breach,
                    has_tokens=self._keep_prompts,
                    calls=[
                        IncidentCall(
                            **call.fields,
                            num_rows=np.asarray(call.num_rows).sum(axis=1).tolist(),
                        )
                        for call in calls
                    ],
                    requests=requests,
                    outcomes=outcomes,
                ),
                state,
                self.engine.config,
            )
        except (OSError, ValueError, RuntimeError) as error:
            line = str(error).partition("\n")[0]
            print(f"jaxkv: an incident was not saved: {line}", file=sys.stderr)
            return
        self.num_saved += 1
        stored = sorted(self.folder.glob(f"incident-*/{INCIDENT_FILE}"))
        for path in stored[: -self._max_incidents]:
            with contextlib.suppress(OSError):
                shutil.rmtree(path.parent)


def _mask_request(request: IncidentRequest, mask: TokenMask) -> IncidentRequest:
    """Returns a request without its tokens, stop tokens and stop strings."""
    return request._replace(
        prompt=mask.replace(request.prompt)[0],
        sampling=dataclasses.replace(request.sampling, stop=(), stop_tokens=()),
        end_tokens=[],
    )
