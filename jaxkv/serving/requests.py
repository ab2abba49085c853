"""Requests on the host: partial answers until their completion."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.engine import DrainedSequences
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes
from jaxkv.serving import outputs
from jaxkv.serving.outputs import Completion, Event, FinishedAnswer, RequestPrompt

if TYPE_CHECKING:
    pass


@dataclasses.dataclass(kw_only=True, eq=False)
class PartialAnswer:
    """One sequence of a request that is not complete."""

    stream: Any
    """Incremental decoder; None without a tokenizer."""
    search: Any = None
    """`StopSearch` of the text; None if there are no stop strings."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    num_delivered: int = 0
    """Characters of the text that were delivered in events."""
    reason: str | None = None
    has_ended: bool = False
    """True if the device has ended the sequence, or was asked to."""
    finished: FinishedAnswer | None = None
    """The answer, once the device has drained the sequence."""


@dataclasses.dataclass(kw_only=True, eq=False)
class RequestRecord:
    """A request that is not complete."""

    request_id: int
    prompt: list[int]
    sampling: Sampling
    arrival_s: float
    end_tokens: tuple[int, ...]
    """Tokens that end an answer and are not part of its text."""
    answers: list[PartialAnswer]
    attributes: RequestAttributes | None = None
    """Attributes for the policy; None means the defaults."""
    key_id: int | None = None
    """Number that keys the samples without a seed; None means `request_id`."""
    is_quiet: bool = False
    """True if events are dropped, since the caller waits for the completion."""
    completion: Completion | None = None
    """Result, once all sequences are closed."""
    first_token_s: float | None = None
    finish_s: float = 0.0
    num_cached: int = 0
    num_recomputed: int = 0
    num_preempted: int = 0
    num_swapped: int = 0
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None

    def to_prompt(self) -> RequestPrompt:
        """Returns the part of the record that a trace keeps."""
        num = self.sampling.num_sequences
        return RequestPrompt(self.request_id, self.prompt, num, self.arrival_s)

    def extend(
        self,
        sample: int,
        tokens: list[int],
        logprobs: list[float],
        reason: str | None,
        now: float,
    ) -> Event:
        """Appends new tokens; ends the sequence early at a stop string."""
        part = self.answers[sample]
        if self.sampling.beam_width is not None:
            # Beams have no answers before the search is done, see `close`.
            part.reason = reason
            self.finish_s = now
            return Event(self.request_id, [], "", None, sample, reason)
        old = len(part.tokens)
        if tokens and self.first_token_s is None:
            self.first_token_s = now
        self.finish_s = now
        for token, logprob in zip(tokens, logprobs, strict=True):
            part.tokens.append(token)
            part.logprobs.append(logprob)
            if part.stream is not None and token not in self.end_tokens:
                part.text += part.stream.push(token)
                if part.search is not None and self._cut_at_stop(part, token):
                    reason = "stop"
                    break
        else:
            # No text follows a stop string, not even half a character.
            if reason and self._flush_text(part) and reason == "length":
                reason = "stop"
        part.reason = reason
        # Text that may be the beginning of a stop string is held back.
        end = len(part.text)
        if part.search is not None and not reason:
            end = max(part.num_delivered, part.search.num_safe(part.text))
        text = part.text[part.num_delivered : end]
        part.num_delivered = end
        return Event(self.request_id, part.tokens[old:], text, None, sample, reason)

    def cancel_sequence(self, sample: int) -> None:
        """Ends a cancelled sequence with its tokens so far."""
        part = self.answers[sample]
        part.reason = "cancelled"
        self._flush_text(part)

    def _flush_text(self, part: PartialAnswer) -> bool:
        """Appends text that the decoder held back; True if it has a stop string."""
        if part.stream is None:
            return False
        part.text += part.stream.finish()
        return part.search is not None and self._cut_at_stop(part, None)

    def _cut_at_stop(self, part: PartialAnswer, token: int | None) -> bool:
        """Cuts the text at the first stop string; returns True if there is one."""
        tail = part.stream.tail()
        place = part.search.push(part.text, tail, token)
        if place is not None:
            part.text = (part.text + tail)[:place]
        return place is not None

    def close(self, sample: int, drained: DrainedSequences | None, row: int) -> None:
        """Completes a sequence; `drained` is None if the device never ran it."""
        part = self.answers[sample]
        ask = self.sampling
        num = len(self.prompt)
        top_logprobs = None
        score = None
        if outputs.needs_logprobs(ask):
            score = sum(part.logprobs)
        if drained is not None and ask.beam_width is not None:
            end = int(np.asarray(drained.progress.num_tokens)[row])
            part.tokens = np.asarray(drained.sequences.tokens)[row, num:end].tolist()
            score = float(np.asarray(drained.sequences.score)[row])
            if part.tokens and self.first_token_s is None:
                self.first_token_s = self.finish_s
            if part.stream is not None:
                pairs = [token for token in part.tokens if token not in self.end_tokens]
                part.text = "".join(map(part.stream.push, pairs)) + part.stream.finish()
        if drained is not None:
            # Indexed on the host: on the device it would compile a program.
            sequences = drained.sequences
            self.num_cached += int(np.asarray(sequences.num_cached)[row])
            self.num_recomputed += int(np.asarray(drained.events.num_recomputed)[row])
            # Sequences of a request are preempted together; ended ones are not.
            num_preempted = int(np.asarray(drained.progress.num_preempted)[row])
            self.num_preempted = max(self.num_preempted, num_preempted)
            num_swapped = int(np.asarray(sequences.num_swapped)[row])
            self.num_swapped = max(self.num_swapped, num_swapped)
            if ask.prompt_logprobs and sample == 0:
                scores = np.asarray(drained.sequences.logprobs)[row, 1:num]
                scores = list(map(float, scores))
                self.prompt_logprobs = [None, *scores]
                if ask.logprobs:
                    pairs = zip(self.prompt[1:], scores, strict=True)
                    sequences = _most_likely(drained, row, 1, pairs, ask.logprobs)
                    self.prompt_top_logprobs = [None, *sequences]
            if ask.logprobs:
                pairs = zip(part.tokens, part.logprobs, strict=True)
                top_logprobs = _most_likely(drained, row, num, pairs, ask.logprobs)
        routes = None
        if drained is not None and drained.routes is not None:
            num_fed = num + len(part.tokens) - 1
            routes = np.array(np.asarray(drained.routes)[row, :num_fed])
        part.finished = FinishedAnswer(
            tokens=part.tokens,
            text=None if part.stream is None else part.text,
            reason=part.reason or "cancelled",
            sample=sample,
            score=score,
            logprobs=None if ask.logprobs is None else part.logprobs,
            top_logprobs=top_logprobs,
            routes=routes,
        )

    def is_complete(self) -> bool:
        """True if all sequences are closed."""
        return all(part.finished is not None for part in self.answers)

    def complete(self) -> Completion:
        """Returns the completion; with `best_of`, the most likely answers first."""
        answers = [part.finished for part in self.answers if part.finished is not None]
        if (self.sampling.best_of or 0) > self.sampling.n:
            # Cut answers score too high, since they have fewer tokens.
            answers.sort(
                key=lambda answer: (
                    answer.reason in ("cancelled", "nan"),
                    -(answer.score or 0.0),
                )
            )
        return Completion(
            request_id=self.request_id,
            answers=answers[: self.sampling.n],
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
            arrival_s=self.arrival_s,
            first_token_s=self.first_token_s,
            finish_s=self.finish_s,
            num_cached=self.num_cached,
            num_recomputed=self.num_recomputed,
            num_preempted=self.num_preempted,
            num_swapped=self.num_swapped,
        )


def _most_likely(
    drained: DrainedSequences,
    row: int,
    start: int,
    alternatives: Iterable[tuple[int, float]],
    num: int,
) -> list[dict[int, float]]:
    """Returns the `num` most likely tokens at positions from `start` on, by id.

    `alternatives` are the tokens at these positions and their log-probabilities. If
    such a token is among the most likely, its value is the same float: the device
    computes the two in different passes, which may differ by rounding.
    """
    s = drained.sequences
    ids = np.asarray(s.top_ids)
    values = np.asarray(s.top_logprobs)
    rows = []
    for place, (token, logprob) in enumerate(alternatives, start):
        if place == ids.shape[1]:  # the token after the largest length is not stored
            rows.append({token: logprob})
            break
        names = ids[row, place, :num].tolist()
        scores = values[row, place, :num]
        best = dict(zip(names, scores.tolist(), strict=True))
        if token in best:
            best[token] = logprob
        rows.append(best)
    return rows
