"""Results for the caller: events, answers, completions."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from jaxkv import validation
from jaxkv.engine import FINISH_REASONS, StepInfo
from jaxkv.sampling import Sampling
from jaxkv.workloads import make_dataframe, per_row


class FinishedAnswer(NamedTuple):
    """A complete answer of a request."""

    tokens: list[int]
    """Tokens, including one that ended the answer."""
    text: str | None
    """Text without stop strings and end tokens: the decoded prompt and answer, without
    the prefix shared with the decoded prompt, see `text.TextStream`. None without a
    tokenizer."""
    reason: str
    """"stop", "length", "cancelled", or "nan" if the logits of the model were not
    finite."""
    sample: int
    """Index of the sequence in the request."""
    score: float | None
    """Log-probability of all tokens, if log-probabilities were requested or answers are
    ranked; of a beam search, divided by its length to the power of `length_penalty`."""
    logprobs: list[float] | None
    """Log-probability of each token, if requested."""
    top_logprobs: list[dict[int, float]] | None
    """Most likely tokens at each position, if requested."""
    routes: Int32[np.ndarray, "tokens_before_last mixtures top_k"] | None = None
    """Experts of each token of prompt and answer but the last, which was not fed, if
    the engine records them; `NO_EXPERT` where K and V were lost before the end."""


class Completion(NamedTuple):
    """Result of a request. Times are in seconds since the engine was made."""

    request_id: int
    """The caller's id of the request."""
    answers: list[FinishedAnswer]
    """The `n` answers: in order of sample, best first with `best_of` and beams."""
    prompt_logprobs: list[float | None] | None
    """Log-probability of each prompt token, None for the first, if requested."""
    prompt_top_logprobs: list[dict[int, float] | None] | None
    """Most likely tokens at each position of the prompt, None at the first, if
    requested by `prompt_logprobs` and `logprobs` of at least 1."""
    arrival_s: float
    """Arrival time."""
    first_token_s: float | None
    """Time at which the host read the first token; None if there was none."""
    finish_s: float
    """Time at which the host read the last token."""
    num_cached: int
    """Prompt tokens found in the prefix cache."""
    num_recomputed: int
    """Tokens that were fed again after a preemption."""
    num_preempted: int
    """Preemptions of the request."""
    num_swapped: int
    """Preemptions by swapping, which keep the pages."""

    def __repr__(self) -> str:
        """One line: the first answer, and the number of answers."""
        text = (
            "" if self.text is None else f", text={validation.format_value(self.text)}"
        )
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
        """Finish reason of the first answer."""
        return self.answers[0].reason

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probabilities of the first answer."""
        return self.answers[0].logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """Most likely tokens at each position of the first answer."""
        return self.answers[0].top_logprobs


class RequestPrompt(NamedTuple):
    """A request of a trace."""

    request_id: int
    prompt: list[int]
    """Tokens of the prompt."""
    num_sequences: int
    arrival_s: float
    """Arrival time, in seconds since the engine was made."""


class TraceCall(NamedTuple):
    """A call of a trace: its times, in seconds since the engine was made."""

    dispatch_s: float
    """Time at which the call was dispatched."""
    read_s: float
    """Time at which its results were read."""
    requests: tuple[RequestPrompt, ...]
    """Requests that were submitted just before the call."""


class Trace(list[StepInfo]):
    """Step infos of an engine's calls, as NumPy arrays.

    With `EngineConfig.record_pages`, `RunTrace.of_engine` makes a viewer of it.
    """

    def __init__(self, infos: Iterable[StepInfo] = ()):
        """Copies the infos, and the calls if they are a trace."""
        super().__init__(infos)
        self.calls: list[TraceCall] = [*getattr(infos, "calls", ())]
        """Times and requests of the calls, in the order of the infos."""
        self.max_steps: int | None = getattr(infos, "max_steps", None)
        """Largest number of steps, but for those of one call; None keeps all."""

    def clear(self) -> None:
        """Drops all calls."""
        super().clear()
        self.calls.clear()

    def add(self, info: StepInfo, call: TraceCall) -> None:
        """Adds a call, and drops the oldest ones beyond `max_steps`.

        Requests of a dropped call that run or wait in the next one move to it, with
        `EngineConfig.record_pages`.
        """
        self.append(info)
        self.calls.append(call)
        num_steps = sum(len(info.enough) for info in self)
        while self.max_steps and num_steps - len(self[0].enough) >= self.max_steps:
            num_steps -= len(self.pop(0).enough)
            dropped = self.calls.pop(0).requests
            pages = self[0].pages
            queue = [] if pages is None else pages.queue.ravel().tolist()
            names = {*self[0].request_id.ravel().tolist(), *queue}
            open_requests = (x for x in dropped if x.request_id in names)
            requests = (*open_requests, *self.calls[0].requests)
            self.calls[0] = self.calls[0]._replace(requests=requests)

    def __repr__(self) -> str:
        """One line: the numbers of calls and steps."""
        num_steps = sum(len(info.enough) for info in self)
        return f"Trace({len(self)} calls, {num_steps} steps)"

    def to_dataframe(self) -> Any:
        """Returns a data frame with a row per step, counts summed over slots.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        if not self:
            return make_dataframe({"step": []})
        info = jax.tree.map(lambda *x: np.concatenate(x), *self)
        return make_dataframe(per_row(info._asdict(), ("step",)))


class Event(NamedTuple):
    """New tokens, text or results of a request."""

    request_id: int
    tokens: list[int]
    """New tokens."""
    text: str
    """New text; empty without a tokenizer."""
    completion: Completion | None
    """Result of the request, in its last event; None before."""
    sample: int = 0
    """Index of the sequence that the tokens and the text belong to."""
    reason: str | None = None
    """Finish reason of the sequence, in one event only."""


def needs_logprobs(ask: Sampling) -> bool:
    """True if a request needs log-probabilities of its tokens, returned or not."""
    return ask.logprobs is not None or (ask.best_of or 0) > ask.n


def group_emitted(
    info: StepInfo,
) -> Iterator[tuple[int, int, list, list, str | None]]:
    """Groups the tokens that a call emitted by sequence.

    Yields:
      Request id, sample, tokens, log-probabilities, and the finish reason or None.
    """
    steps, slots = np.nonzero((info.num_emitted > 0) | (info.reason > 0))
    by_sequence: dict[tuple[int, int], tuple[list, list]] = {}
    ended: dict[tuple[int, int], int] = {}
    for step, slot in zip(steps, slots, strict=True):
        name = int(info.request_id[step, slot]), int(info.sample[step, slot])
        num = int(info.num_emitted[step, slot])
        tokens, logprobs = by_sequence.setdefault(name, ([], []))
        tokens += info.tokens[step, slot, :num].tolist()
        logprobs += info.logprobs[step, slot, :num].tolist()
        ended[name] = int(info.reason[step, slot])
    for name, (tokens, logprobs) in by_sequence.items():
        yield *name, tokens, logprobs, FINISH_REASONS[ended[name]]
