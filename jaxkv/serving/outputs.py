"""What the host tells of requests: events, answers, completions."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv import validation
from jaxkv.engine import state
from jaxkv.engine.step import StepInfo
from jaxkv.sampling import Sampling
from jaxkv.workloads import dataframes


class FinishedAnswer(NamedTuple):
    """One of a request's answers."""

    tokens: list[int]
    """Its tokens, one that ended it included."""
    text: str | None
    """The text without stop strings and end tokens: the decode of prompt and answer,
    less the beginning that it shares with the decode of the prompt, see
    `text.TextStream`. None without a tokenizer."""
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
    answers: list[FinishedAnswer]
    """The `n` answers: in order of sample, best first with `best_of` and beams."""
    prompt_logprobs: list[float | None] | None
    """Log-probability of each prompt token, None for the first, if asked for."""
    prompt_top_logprobs: list[dict[int, float] | None] | None
    """Most likely tokens at each place of the prompt, None at the first, if asked for:
    with `prompt_logprobs` and `logprobs` of at least 1."""
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

    def __repr__(self) -> str:
        """One line: the first answer, and how many there are."""
        text = "" if self.text is None else f", text={validation.shown(self.text)}"
        more = f", {len(self.answers)} answers" if len(self.answers) > 1 else ""
        return (
            f"Completion(request_id={self.request_id}, {len(self.tokens)} tokens"
            f"{text}, reason={self.reason!r}{more})"
        )

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


class Trace(list[StepInfo]):
    """The step infos of an engine's calls, as NumPy arrays."""

    def __repr__(self) -> str:
        """One line: how many calls and steps."""
        num_steps = sum(len(info.enough) for info in self)
        return f"Trace({len(self)} calls, {num_steps} steps)"

    def to_dataframe(self) -> Any:
        """Returns a data frame with a row per step, counts summed over slots.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        if not self:
            return dataframes.make({"step": []})
        info = jax.tree.map(lambda *x: np.concatenate(x), *self)
        return dataframes.make(dataframes.per_row(info._asdict(), ("step",)))


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


def needs_logprobs(ask: Sampling) -> bool:
    """Whether a request needs log-probabilities of its tokens, told or not."""
    return ask.logprobs is not None or (ask.best_of or 0) > ask.n


def group_emitted(
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
