"""What the host knows of a request: its prompt, its answer so far, how it ended."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv import engine, queueing, randomness, sampling, states
from jaxkv.sampling import Sampling
from jaxkv.states import EngineConfig


class Completion(NamedTuple):
    """The answer to a request. Times are in seconds since the engine was made."""

    request_id: int
    """The caller's name for the request."""
    tokens: list[int]
    """Tokens of the answer, one that ended it included."""
    text: str | None
    """The answer without stop strings and end tokens; None without a tokenizer."""
    reason: str
    """"stop", "length", "cancelled", or "nan" where the model broke down."""
    logprobs: list[float] | None
    """Log-probability of each token, if asked for."""
    top_logprobs: list[dict[int, float]] | None
    """Most likely tokens at each place, if asked for."""
    prompt_logprobs: list[float | None] | None
    """Log-probability of each prompt token, None for the first, if asked for."""
    arrival_s: float
    """When the request came."""
    first_token_s: float | None
    """When the host held its first token; None if there was none."""
    finish_s: float
    """When the host held its last."""
    num_cached: int
    """Prompt tokens whose K and V were found rather than computed."""
    num_recomputed: int
    """Tokens whose K and V were computed again after a preemption."""


class Event(NamedTuple):
    """Something new about a request."""

    request_id: int
    tokens: list[int]
    """New tokens."""
    text: str
    """New text; empty without a tokenizer."""
    completion: Completion | None
    """The whole answer, with the last event of a request."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Record:
    """A request that is not complete."""

    request_id: int
    prompt: list[int]
    sampling: Sampling
    arrival_s: float
    stream: Any
    """Incremental decoder; None without a tokenizer."""
    end_tokens: tuple[int, ...]
    """Tokens that end the answer and are not part of its text."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    shown: int = 0
    """Characters of the text that events have told."""
    reason: str | None = None
    first_token_s: float | None = None
    finish_s: float = 0.0

    def extend(
        self, tokens: list[int], logprobs: list[float], reason: str | None, now: float
    ) -> Event:
        """Takes new tokens; ends early where the text contains a stop string."""
        old = len(self.tokens)
        if tokens and self.first_token_s is None:
            self.first_token_s = now
        self.finish_s = now
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if self.stream is not None and token not in self.end_tokens:
                self.text += self.stream.push(token)
                if self._stops():
                    reason = "stop"
                    break
        self.reason = reason
        if reason and self.stream is not None and not self._stops():
            self.text += self.stream.finish()
            self._stops()
        # Text that may be the beginning of a stop string is held back.
        stops = self.sampling.stop
        hold = 0 if reason else max(map(len, stops), default=1) - 1
        end = max(self.shown, len(self.text) - hold)
        text, self.shown = self.text[self.shown : end], end
        return Event(self.request_id, self.tokens[old:], text, None)

    def _stops(self) -> bool:
        """Cuts the text at the first stop string, if there is one."""
        found = [self.text.find(stop) for stop in self.sampling.stop]
        found = [place for place in found if place >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def complete(self, drained: states.Sequences | None, row: int) -> Completion:
        """The whole answer, with what the device kept in a row of its sequences."""
        ask, num = self.sampling, len(self.prompt)

        def count(name: str) -> int:
            # Indexed on the host: on the device it would compile a program.
            return (
                0 if drained is None else int(np.asarray(getattr(drained, name))[row])
            )

        prompt_logprobs = top_logprobs = None
        if drained is not None and ask.prompt_logprobs:
            scores = np.asarray(drained.logprobs)[row, 1:num]
            prompt_logprobs = [None, *map(float, scores)]
        if drained is not None and ask.logprobs:
            answer = slice(num, num + len(self.tokens))
            ids = np.asarray(drained.top_ids)[row, answer, : ask.logprobs]
            values = np.asarray(drained.top_logprobs)[row, answer, : ask.logprobs]
            top_logprobs = [
                dict(zip(names.tolist(), scores.tolist(), strict=True))
                for names, scores in zip(ids, values, strict=True)
            ]
        return Completion(
            request_id=self.request_id,
            tokens=self.tokens,
            text=None if self.stream is None else self.text,
            reason=self.reason or "cancelled",
            logprobs=None if ask.logprobs is None else self.logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            arrival_s=self.arrival_s,
            first_token_s=self.first_token_s,
            finish_s=self.finish_s,
            num_cached=count("num_cached"),
            num_recomputed=count("num_recomputed"),
        )


def check(
    tokens: Sequence[int],
    ask: Sampling,
    *,
    config: EngineConfig,
    num_eos: int,
    vocab_size: int | None,
    has_text: bool,
) -> None:
    """Refuses a request that an engine could never serve.

    Args:
      tokens: the prompt.
      ask: how to draw.
      config: the engine's bounds.
      num_eos: end tokens of the model.
      vocab_size: token ids must lie below it; None does not check.
      has_text: whether there is a tokenizer.

    Raises:
      ValueError: in one line, what does not fit and what would.
    """
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if len(tokens) >= config.max_length:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, and {config.max_length=} "
            f"leaves room for at most {config.max_length - 1}"
        )
    limit = min(len(tokens) + ask.max_tokens, config.max_length)
    pages = -(-(limit - 1) // config.page_size)
    if pages > config.num_pages:
        raise ValueError(
            f"the request may need {pages} pages, more than {config.num_pages=}"
        )
    top = 2**31 if vocab_size is None else vocab_size
    for token in (*tokens, *ask.stop_tokens):
        if not 0 <= token < top:
            raise ValueError(f"token id {token} must be in [0, {top})")
    if len(ask.stop_tokens) + num_eos > config.max_stop_tokens:
        raise ValueError(
            f"{len(ask.stop_tokens)} stop tokens and {num_eos} end tokens of the model "
            f"must be at most {config.max_stop_tokens=}"
        )
    if ask.stop and not has_text:
        raise ValueError("stop strings need a tokenizer; use stop_tokens")
    if (ask.logprobs or 0) > config.max_logprobs:
        raise ValueError(f"{ask.logprobs=} must be at most {config.max_logprobs=}")
    if ask.prompt_logprobs and config.num_logit_rows == config.max_slots:
        raise ValueError(
            f"prompt_logprobs need max_logit_rows above {config.max_slots=}"
        )


def make_requests(
    prompts: Sequence[Sequence[int]],
    asks: Sequence[Sampling],
    *,
    config: EngineConfig,
    request_ids: Sequence[int] | None = None,
    arrivals_s: Sequence[float] | None = None,
    eos_ids: tuple[int, ...] = (),
    width: int | None = None,
) -> queueing.Requests:
    """Lines up requests for `queueing.submit`, as NumPy arrays.

    Args:
      prompts: token ids, in order of arrival.
      asks: how to draw each one's answer.
      config: the engine's bounds.
      request_ids: the callers' names; None counts from 0.
      arrivals_s: when each may be admitted; None means at once.
      eos_ids: end tokens of the model.
      width: rows of the result, those beyond the prompts unused; None means as many as
        there are prompts.

    Returns:
      The requests. `submit` refuses those that do not fit the engine.
    """
    num = len(prompts)
    width = num if width is None else width
    request_ids = range(num) if request_ids is None else request_ids
    arrivals_s = [0.0] * num if arrivals_s is None else arrivals_s
    tokens: Any = np.zeros((width, config.max_length), np.int32)
    stops: Any = np.full((width, config.max_stop_tokens), -1, np.int32)
    for row, (prompt, ask) in enumerate(zip(prompts, asks, strict=True)):
        known = prompt[: config.max_length]
        tokens[row, : len(known)] = known
        ends = ask.stop_tokens + (() if ask.ignore_eos else eos_ids)
        stops[row, : len(ends)] = ends
    lengths = [len(prompt) for prompt in prompts]
    limits = [
        min(length + ask.max_tokens, config.max_length)
        for length, ask in zip(lengths, asks, strict=True)
    ]

    def column(values: Any, dtype: Any = np.int32) -> Any:
        values = np.array(values, dtype)
        blank = np.zeros((width - num, *values.shape[1:]), dtype)
        return np.concatenate([values, blank])

    keys = [
        randomness.request_key(ask.seed, config.seed, name)
        for ask, name in zip(asks, request_ids, strict=True)
    ]
    unused = width - num
    return queueing.Requests(
        tokens=tokens,
        prompt_length=column(lengths),
        limit=column(limits),
        request_id=column(list(request_ids)),
        stop_tokens=stops,
        params=sampling.params_of(
            [*asks, *[Sampling.greedy()] * unused],
            [*keys, *[np.zeros(2, np.uint32)] * unused],
            [0] * width,
        ),
        scored=column([ask.logprobs is not None for ask in asks], bool),
        prompt_scored=column([ask.prompt_logprobs for ask in asks], bool),
        arrival=column([clock(time_s) for time_s in arrivals_s]).reshape(width, 2),
    )


def clock(seconds: float) -> np.ndarray:
    """Seconds as two integers: seconds and microseconds."""
    whole = int(seconds)
    return np.array([whole, int((seconds - whole) * 1e6)], np.int32)


def emitted(info: engine.StepInfo) -> Iterator[tuple[int, list, list, str | None]]:
    """What each request got from a call's steps.

    Yields:
      Request id, tokens, log-probabilities, and why it ended, if it did.
    """
    steps, slots = np.nonzero((info.num_emitted > 0) | (info.reason > 0))
    found: dict[int, tuple[list, list]] = {}
    ended: dict[int, int] = {}
    for step, slot in zip(steps, slots, strict=True):
        name, num = int(info.request_id[step, slot]), int(info.num_emitted[step, slot])
        tokens, logprobs = found.setdefault(name, ([], []))
        tokens += info.tokens[step, slot, :num].tolist()
        logprobs += info.logprobs[step, slot, :num].tolist()
        ended[name] = int(info.reason[step, slot])
    for name, (tokens, logprobs) in found.items():
        yield name, tokens, logprobs, states.REASONS[ended[name]]
