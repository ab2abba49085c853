"""Host-side bookkeeping of requests, without reading the engine's state.

Tracks requests that wait on the host, run on the device, or have ended there, and the
events to deliver. It counts instead of reading the state: a row of `Sequences` is in
use from the call that submits a request until the call that drained it is read.
"""

import bisect
import collections
import itertools
import math

import numpy as np

from jaxkv.engine import (
    CANCELLED,
    DrainedSequences,
    EngineConfig,
    RequestKinds,
    StepInfo,
)
from jaxkv.sampling import Grammar, Sampling
from jaxkv.serving import outputs
from jaxkv.serving.outputs import Event
from jaxkv.serving.requests import RequestRecord


class RequestTracker:
    """Requests of one engine, from `submit` to the last event."""

    def __init__(self, config: EngineConfig):
        """Makes a tracker without requests."""
        self.config = config
        self.records: dict[int, RequestRecord] = {}
        """Requests that are not complete, by id."""
        # Not delivered yet; kept so that an abandoned stream loses none.
        self.events: collections.deque[Event] = collections.deque()
        self._pending = collections.deque[RequestRecord]()  # by arrival
        self.withdrawn: list[RequestRecord] = []
        """Requests that were cancelled before they were submitted to the device."""
        self._cancels: list[tuple[int, int]] = []
        # Rows of `Sequences`: submitted and not known to have ended; ended and not
        # drained. Requests submitted and not drained; those of them that are ready to
        # be drained.
        self._unfinished = 0
        self._finished = 0
        self._requests = 0
        self._ready = 0

    def is_empty(self) -> bool:
        """True if no request or event is left."""
        return not (self.records or self.events or self._unfinished or self._finished)

    def has_work(self, now: float) -> bool:
        """True if the device must run."""
        return self.has_submitted() or self.next_arrival_s() <= now

    def has_submitted(self) -> bool:
        """True if requests were submitted to the device and are not drained."""
        return bool(self._unfinished or self._finished or self._cancels)

    @property
    def num_unfinished(self) -> int:
        """Sequences submitted to the device that are not known to have ended."""
        return self._unfinished

    def next_arrival_s(self) -> float:
        """Returns the next arrival of a request on the host; infinity without one."""
        return self._pending[0].arrival_s if self._pending else math.inf

    def num_pending(self, now: float) -> int:
        """Returns the number of arrived requests that wait on the host."""
        return sum(record.arrival_s <= now for record in self._pending)

    def num_tokens(self) -> int:
        """Returns the tokens of all requests that are not complete.

        Beams count their largest length, since their tokens are read at the end.
        """
        return sum(
            len(record.prompt) + len(part.tokens) + _num_to_search(record)
            for record in self.records.values()
            for part in record.answers
        )

    def oldest(self, now: float) -> RequestRecord | None:
        """Returns the request with the earliest arrival that is not complete."""
        arrived = (x for x in self.records.values() if x.arrival_s <= now)
        return min(arrived, key=lambda record: record.arrival_s, default=None)

    def add(self, record: RequestRecord) -> None:
        """Adds a request; it waits until it arrives and the device has room.

        Raises:
          ValueError: a request with the same id still runs.
        """
        request_id = record.request_id
        if request_id in self.records:
            raise ValueError(f"{request_id=} is the name of a request still running")
        # In order of arrival: a request never waits for one that arrives later.
        bisect.insort(self._pending, record, key=lambda entry: entry.arrival_s)
        self.records[request_id] = record

    def cancel(self, request_id: int, now: float) -> None:
        """Ends a request with its tokens so far; unknown ids are ignored."""
        record = self.records.get(request_id)
        if record is None:
            return
        if record in self._pending:
            self._pending.remove(record)
            record.finish_s = now
            self.withdrawn.append(record)
        elif any(part.reason is None for part in record.answers):
            self._cancels.append((request_id, -1))

    def close_withdrawn(self) -> None:
        """Completes the withdrawn requests."""
        for record in self.withdrawn:
            for sample in range(len(record.answers)):
                self._close(record, sample, None, 0)
        self.withdrawn.clear()

    def next_batch(self, now: float) -> list[RequestRecord]:
        """Returns the next requests to submit: those that are sure to fit."""
        config = self.config
        requests = config.queue_capacity + config.max_slots - self._requests
        num_sequences = self._unfinished + self._finished
        rows = max(config.submit_width, config.max_slots)
        rows = min(rows, config.max_sequences - num_sequences)
        batch: list[RequestRecord] = []
        for record in itertools.islice(self._pending, max(0, requests)):
            rows -= len(record.answers)
            if rows < 0 or record.arrival_s > now:
                break
            batch.append(record)
        return batch

    def submitted_grammars(self) -> set[Grammar | None]:
        """Returns the grammars of requests on the device."""
        waiting = {record.request_id for record in self._pending}
        return {
            record.sampling.grammar
            for record in self.records.values()
            if record.request_id not in waiting
        }

    def mark_submitted(self, batch: list[RequestRecord]) -> None:
        """Counts the requests of `next_batch` as submitted."""
        for record in batch:
            self._pending.remove(record)
            self._unfinished += len(record.answers)
        self._requests += len(batch)

    def request_kinds(self) -> RequestKinds:
        """Returns the kinds of all requests that are not complete."""
        asks = [record.sampling for record in self.records.values()]
        return RequestKinds(
            sampled=any(not _is_plain(ask) for ask in asks),
            grouped=any(
                ask.beam_width is not None or ask.num_sequences > 1 for ask in asks
            ),
        )

    def has_cancels(self) -> bool:
        """True if requests on the device are to be cancelled."""
        return bool(self._cancels)

    def needs_drain(self) -> bool:
        """True if requests on the device are ready to be drained."""
        return self._ready > 0

    def mark_drained(self) -> None:
        """Counts all requests that are ready as drained."""
        self._ready = 0

    def next_cancels(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and samples of the next requests to cancel, which are then ready.

        A sample of -1 is all of a request. Unused entries are -1.
        """
        self._ready += 1
        named = np.full((self.config.max_sequences, 2), -1, np.int32)
        now = self._cancels[: len(named)]
        remaining_cancels = self._cancels[len(named) :]
        self._cancels = remaining_cancels
        named[: len(now)] = np.array(now, np.int32).reshape(-1, 2)
        for name, sample in now:
            if record := self.records.get(name):
                for part in record.answers if sample < 0 else [record.answers[sample]]:
                    part.has_ended = True
        return named[:, 0], named[:, 1]

    def read(self, info: StepInfo, now: float) -> None:
        """Processes the outputs of a call.

        Args:
          info: step infos, as NumPy arrays.
          now: seconds since the engine was made.
        """
        for name, sample, tokens, logprobs, reason in outputs.group_emitted(info):
            record = self.records.get(name)
            if reason is not None:
                self._unfinished -= 1
                self._finished += 1
                if record is not None and not record.answers[sample].has_ended:
                    record.answers[sample].has_ended = True
                    self._ready += all(part.has_ended for part in record.answers)
            if record is None or record.answers[sample].reason is not None:
                continue  # ended by a stop string; later tokens are dropped
            self._emit(record, record.extend(sample, tokens, logprobs, reason, now))
            if record.answers[sample].reason is not None and reason is None:
                self._cancels.append((name, sample))

    def collect(self, drained: DrainedSequences, now: float) -> None:
        """Closes the sequences that the device has drained."""
        rows = np.flatnonzero(np.asarray(drained.is_final))
        s = drained.sequences
        names = np.asarray(s.request_id)
        reasons = np.asarray(s.reason)
        samples = np.asarray(s.params.sample)
        for row in rows.tolist():
            if reasons[row] == CANCELLED:
                self._unfinished -= 1
            else:
                self._finished -= 1
            record = self.records.get(int(names[row]))
            if record is not None:
                if record.answers[samples[row]].reason is None:
                    record.finish_s = now
                self._close(record, int(samples[row]), drained, row)

    def _close(
        self,
        record: RequestRecord,
        sample: int,
        drained: DrainedSequences | None,
        row: int,
    ) -> None:
        """Closes a sequence; completes the request if it was the last one."""
        part = record.answers[sample]
        cancelled = part.reason is None
        if cancelled:
            record.cancel_sequence(sample)
        record.close(sample, drained, row)
        text = part.text[part.num_delivered :]
        completion = None
        if record.is_complete():
            del self.records[record.request_id]
            self._requests -= drained is not None
            record.completion = completion = record.complete()
        tokens = part.tokens if record.sampling.beam_width is not None else []
        if tokens or text or completion or cancelled:
            reason = part.reason if cancelled else None
            event = Event(record.request_id, tokens, text, completion, sample, reason)
            self._emit(record, event)

    def _emit(self, record: RequestRecord, event: Event) -> None:
        if not record.is_quiet:
            self.events.append(event)


def _num_to_search(record: RequestRecord) -> int:
    """Returns the largest length of a beam's answer; 0 without beams."""
    ask = record.sampling
    return 0 if ask.beam_width is None else ask.max_tokens


def _is_plain(ask: Sampling) -> bool:
    """True if an answer has the most likely tokens, as `sampling.is_plain`."""
    return not (
        ask.temperature > 0
        or ask.repetition_penalty != 1
        or ask.presence_penalty
        or ask.frequency_penalty
        or outputs.needs_logprobs(ask)
    )
