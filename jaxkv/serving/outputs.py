"""Requests as the host makes them, and what it tells of their answers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv import clock, validation
from jaxkv.engine import EngineConfig, requests, state
from jaxkv.engine.step import StepInfo
from jaxkv.sampling import Sampling, beam_search, params_of, random_keys
from jaxkv.serving import refusals


class Answer(NamedTuple):
    """One of a request's answers."""

    tokens: list[int]
    """Its tokens, one that ended it included."""
    text: str | None
    """The text without stop strings and end tokens; None without a tokenizer."""
    reason: str
    """"stop", "length", "cancelled", or "nan" where the model broke down: its logits
    were not all finite."""
    sample: int
    """Which of the request's sequences it is."""
    score: float | None
    """Log-probability of all its tokens, if those were asked for or answers ranked; of
    a beam search, divided by its length to the power of `length_penalty`."""
    logprobs: list[float] | None
    """Log-probability of each token, if asked for."""
    top_logprobs: list[dict[int, float]] | None
    """Most likely tokens at each place, if asked for."""


class Completion(NamedTuple):
    """What became of a request. Times are in seconds since the engine was made."""

    request_id: int
    """The caller's name for the request."""
    answers: list[Answer]
    """The `n` answers: in order of sample, best first with `best_of` and beams."""
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
    num_preempted: int
    """Times that it was preempted."""
    num_swapped: int
    """How many of these kept its pages."""

    @property
    def tokens(self) -> list[int]:
        """Tokens of the first answer."""
        return self.answers[0].tokens

    @property
    def text(self) -> str | None:
        """Text of the first answer."""
        return self.answers[0].text

    @property
    def reason(self) -> str:
        """Why the first answer ended."""
        return self.answers[0].reason

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probabilities of the first answer."""
        return self.answers[0].logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """Alternatives to the tokens of the first answer."""
        return self.answers[0].top_logprobs


class Event(NamedTuple):
    """Something new about a request."""

    request_id: int
    tokens: list[int]
    """New tokens."""
    text: str
    """New text; empty without a tokenizer."""
    completion: Completion | None
    """What became of it, with the last event of a request."""
    sample: int = 0
    """Which of its sequences the tokens and the text belong to."""
    reason: str | None = None
    """Why that sequence ended, told once, when it has."""


def make_requests(
    prompts: Sequence[Sequence[int]],
    asks: Sequence[Sampling],
    *,
    config: EngineConfig,
    request_ids: Sequence[int] | None = None,
    arrivals_s: Sequence[float] | None = None,
    eos_ids: tuple[int, ...] = (),
    width: int | None = None,
) -> requests.Requests:
    """Lines up requests for `requests.submit`, as NumPy arrays.

    Args:
      prompts: token ids, in order of arrival.
      asks: how to draw each one's answers.
      config: the engine's bounds.
      request_ids: the callers' names; None counts from 0.
      arrivals_s: when each may be admitted; None means at once.
      eos_ids: end tokens of the model.
      width: rows of the result, one for each sequence, those beyond them unused; None
        means as many as there are sequences.

    Returns:
      The requests. `submit` refuses those that do not fit the engine.

    Raises:
      ValueError: something is of another type or out of its range, or there is not one
        of everything for each prompt.
    """
    known, asks = _checked_pairs(prompts, asks)
    request_ids, arrivals_s = _names_and_times(len(prompts), request_ids, arrivals_s)
    # Which request each row belongs to, and which of its sequences it is.
    owner = [i for i, ask in enumerate(asks) for _ in range(ask.num_sequences)]
    samples = [sample for ask in asks for sample in range(ask.num_sequences)]
    num = len(owner)
    width = num if width is None else validation.integer("width", width)
    if width < num:
        raise ValueError(f"{width=} must be at least {num}, one row for each sequence")
    tokens: Any = np.zeros((width, config.max_length), np.int32)
    stops: Any = np.full((width, config.max_stop_tokens), -1, np.int32)
    for row, i in enumerate(owner):
        first = known[i][: config.max_length]
        tokens[row, : len(first)] = first
        ends = _ends(asks[i], eos_ids, config)
        stops[row, : len(ends)] = ends
    lengths = [len(ids) for ids in known]
    limits = [
        min(length + ask.max_tokens, config.max_length)
        for length, ask in zip(lengths, asks, strict=True)
    ]

    def column(values: Any, dtype: Any = np.int32) -> Any:
        values = np.array(values, dtype)[np.array(owner, int)]
        blank = np.zeros((width - num, *values.shape[1:]), dtype)
        return np.concatenate([values, blank])

    keys = [
        random_keys.request_key(ask.seed, config.seed, name)
        for ask, name in zip(asks, request_ids, strict=True)
    ]
    unused = width - num
    prompt_scored = column([ask.prompt_logprobs for ask in asks], bool)
    prompt_scored[:num] &= np.array(samples, np.int32) == 0  # who reads the prompt
    return requests.Requests(
        tokens=tokens,
        prompt_length=column(lengths),
        limit=column(limits),
        request_id=column(list(request_ids)),
        stop_tokens=stops,
        params=params_of(
            [*[asks[i] for i in owner], *[Sampling.greedy()] * unused],
            [*[keys[i] for i in owner], *[np.zeros(2, np.uint32)] * unused],
            [*samples, *[0] * unused],
        ),
        salt=column([ask.salt for ask in asks], np.uint32),
        reuses=column([ask.prefix_cache for ask in asks], bool),
        scored=column([scores(ask) for ask in asks], bool),
        prompt_scored=prompt_scored,
        beam_width=column([ask.beam_width or 0 for ask in asks]),
        length_penalty=column([ask.length_penalty for ask in asks], np.float32),
        early_stopping=column([_STOPPING[ask.early_stopping] for ask in asks]),
        arrival=column(clock.from_seconds(np.array(arrivals_s, np.float64))),
    )


def _names_and_times(
    num: int, request_ids: Sequence[int] | None, arrivals_s: Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """One name and one time for each of so many requests."""
    request_ids = range(num) if request_ids is None else request_ids
    arrivals_s = [0.0] * num if arrivals_s is None else arrivals_s
    for name, values in (("request_ids", request_ids), ("arrivals_s", arrivals_s)):
        if len(values) != num:
            raise ValueError(f"len({name})={len(values)} must be len(prompts)={num}")
    names = [refusals.request_name("request_ids", x) for x in request_ids]
    return names, [validation.seconds("arrivals_s", x) for x in arrivals_s]


def _ends(
    ask: Sampling, eos_ids: tuple[int, ...], config: EngineConfig
) -> tuple[int, ...]:
    """The tokens that end a request."""
    ends = ask.stop_tokens + (() if ask.ignore_eos else eos_ids)
    if len(ends) > config.max_stop_tokens:
        raise ValueError(
            f"{len(ends)} tokens that end a request must be at most "
            f"{config.max_stop_tokens=}"
        )
    return ends


def _checked_pairs(
    prompts: Sequence[object], asks: Sequence[object]
) -> tuple[list[np.ndarray], list[Sampling]]:
    """Checks that there are token ids and a `Sampling` for each request."""
    if len(asks) != len(prompts):
        raise ValueError(f"{len(asks)=} must be {len(prompts)=}")
    found = []
    for i, ask in enumerate(asks):
        if not isinstance(ask, Sampling):
            raise ValueError(f"asks[{i}]={validation.shown(ask)} must be a Sampling")
        found.append(ask)
    known = [validation.tokens(f"prompts[{i}]", x) for i, x in enumerate(prompts)]
    for i, ids in enumerate(known):
        outside = ids[(ids < 0) | (ids >= validation.INT32)]
        if outside.size:
            raise ValueError(f"prompts[{i}]: token id {outside[0]} is out of int32")
    return known, found


_STOPPING: dict[bool | str, int] = {
    False: beam_search.ESTIMATE,
    True: beam_search.FULL,
    "never": beam_search.NEVER,
}


def scores(ask: Sampling) -> bool:
    """Whether a request needs log-probabilities of its tokens, told or not."""
    return ask.logprobs is not None or (ask.best_of or 0) > ask.n


def emitted(
    info: StepInfo,
) -> Iterator[tuple[int, int, list, list, str | None]]:
    """What each sequence got from a call's steps.

    Yields:
      Request id, sample, tokens, log-probabilities, and why it ended, if it did.
    """
    steps, slots = np.nonzero((info.num_emitted > 0) | (info.reason > 0))
    found: dict[tuple[int, int], tuple[list, list]] = {}
    ended: dict[tuple[int, int], int] = {}
    for step, slot in zip(steps, slots, strict=True):
        name = int(info.request_id[step, slot]), int(info.sample[step, slot])
        num = int(info.num_emitted[step, slot])
        tokens, logprobs = found.setdefault(name, ([], []))
        tokens += info.tokens[step, slot, :num].tolist()
        logprobs += info.logprobs[step, slot, :num].tolist()
        ended[name] = int(info.reason[step, slot])
    for name, (tokens, logprobs) in found.items():
        yield *name, tokens, logprobs, state.REASONS[ended[name]]
