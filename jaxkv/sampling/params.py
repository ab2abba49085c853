"""What a request may ask of its draws: checked on the host, arrays on the device."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from jaxkv import validation

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)

type _Check = Callable[[str, object], Any]
"""Takes a field's name and value; returns the value, or says what is wrong with it."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request wants its tokens drawn, and what ends it."""

    temperature: float = 1.0
    """Divides the logits, finite, at least 0; 0 takes the most likely token."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    top_p: float = 1.0
    """Probability that the kept tokens reach, in (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """Smallest probability kept, as a share of the largest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that stand in
    the prompt or the answer, above 0; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that stand in the answer, finite."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit for each time its token stands in the answer, finite."""
    seed: int | None = None
    """Fixes the draws whatever the engine's seed and the request's id, in
    [0, 2**64)."""
    n: int = 1
    """Answers wanted, at least 1, drawn apart from each other. They share the pages of
    the prompt, which is read once."""
    best_of: int | None = None
    """Answers drawn, at least `n`, of which the `n` most likely ones are returned; None
    draws `n`."""
    beam_width: int | None = None
    """Searches with so many beams, at least `n`, instead of drawing, and returns the
    `n` best answers; None draws."""
    length_penalty: float = 1.0
    """Of a beam search: an answer scores its log-probability divided by its length to
    this power, in [-10, 10]."""
    early_stopping: bool | str = False
    """Whether a beam search ends as soon as it has enough answers; False ends it once
    the best beam looks hopeless, "never" once none can become better."""
    max_tokens: int = 64
    """Tokens after which the answer ends, at least 1."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, none of them empty."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """Whether the answer goes on after the model's own end token."""
    logprobs: int | None = None
    """Alternatives reported with each token's log-probability, at least 0; None
    reports neither."""
    prompt_logprobs: bool = False
    """Whether the prompt's tokens get log-probabilities, too, and the alternatives that
    `logprobs` asks for."""

    prefix_cache: bool = True
    """Whether the request may start on cached pages of its first tokens, and leave its
    own; pages hold the same either way."""
    salt: int = 0
    """Cached pages are shared among requests of the same salt only, in [0, 2**32)."""

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
          ValueError: a field is out of its range; the message shows it.
        """
        for name, check in _CHECKS.items():
            # What passes is Python's own number, also where it was NumPy's.
            value = getattr(self, name)
            plain = check(name, value)
            if plain is not value:
                object.__setattr__(self, name, plain)
        for name in ("best_of", "beam_width"):
            num = getattr(self, name)
            if num is not None and num < self.n:
                raise ValueError(f"{name}={num} must be None or at least n={self.n}")
        asks_more = (
            self.best_of is not None
            or self.logprobs is not None
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.prompt_logprobs
            or self.stop
        )
        if self.beam_width is not None and asks_more:
            raise ValueError(
                "beam search takes no best_of, penalties, logprobs or stop strings"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences that a request owns."""
        if self.beam_width is not None:
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    @classmethod
    def greedy(cls, **fields: Any) -> "Sampling":
        """The most likely token at every position; `fields` sets everything else."""
        return cls(temperature=0.0, **fields)


def _count(low: int = 0, hint: str = "", below: int = validation.INT32) -> _Check:
    return lambda name, value: validation.integer(
        name, value, low=low, below=below, hint=hint
    )


def _number(low: float, high: float, hint: str) -> _Check:
    return lambda name, value: validation.number(
        name, value, low=low, high=high, hint=hint
    )


def _or_none(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, tuple) and all(isinstance(x, str) and x for x in value):
        return value
    raise ValueError(
        f"{name}={validation.shown(value)} must be a tuple of strings, none of them "
        "empty"
    )


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    refused = f"{name}={validation.shown(value)} must be a tuple of token ids"
    if not isinstance(value, tuple):
        raise ValueError(refused)
    try:
        return tuple(validation.integer(name, token) for token in value)
    except ValueError:
        raise ValueError(refused) from None


_ANY = _number(-_LARGEST, _LARGEST, "finite")
_CHECKS: dict[str, _Check] = {
    "temperature": _number(0.0, _LARGEST, ">= 0 and finite"),
    "top_k": _count(hint="a count, or 0 for off"),
    "top_p": _number(math.ulp(0.0), 1.0, "in (0, 1]"),
    "min_p": _number(0.0, 1.0, "in [0, 1]"),
    "repetition_penalty": _number(_SMALLEST, _LARGEST, "above 0 and finite"),
    "presence_penalty": _ANY,
    "frequency_penalty": _ANY,
    "seed": _or_none(_count(below=2**64, hint="None or an integer in [0, 2**64)")),
    "n": _count(1),
    "best_of": _or_none(_count(hint="None or at least n")),
    "beam_width": _or_none(_count(hint="None or at least n")),
    "length_penalty": _number(-10.0, 10.0, "in [-10, 10]"),
    "early_stopping": lambda name, value: validation.choice(
        name, value, (True, False, "never")
    ),
    "max_tokens": _count(1),
    "stop": _texts,
    "stop_tokens": _token_ids,
    "ignore_eos": validation.boolean,
    "logprobs": _or_none(_count(hint="None or at least 0")),
    "prompt_logprobs": validation.boolean,
    "prefix_cache": validation.boolean,
    "salt": _count(below=2**32),
}
"""What each field of `Sampling` is checked by."""


class Params(NamedTuple):
    """What drawing needs to know of each row's request. Ranges as in `Sampling`."""

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    key: UInt32[Array, "rows 2"]
    """The request's key, see `request_key`."""
    sample: Int32[Array, " rows"]
    """Which of the request's answers the row belongs to, from 0."""


def make_params(
    requests: Sequence[Sampling], keys: Sequence[Any], samples: Sequence[int]
) -> Params:
    """Lines up the parameters of several sequences, as NumPy arrays, one row each.

    A sequence has the parameters of its request, and the key that `request_key` gave
    for it; `samples` says which of its request's answers it is.
    """
    fields = {
        "temperature": ("temperature", np.float32),
        "top_k": ("top_k", np.int32),
        "top_p": ("top_p", np.float32),
        "min_p": ("min_p", np.float32),
        "repetition": ("repetition_penalty", np.float32),
        "presence": ("presence_penalty", np.float32),
        "frequency": ("frequency_penalty", np.float32),
    }
    columns: dict[str, Any] = {
        field: np.array([getattr(each, name) for each in requests], kind)
        for field, (name, kind) in fields.items()
    }
    columns["key"] = np.array(keys, np.uint32).reshape(len(requests), 2)
    columns["sample"] = np.array(samples, np.int32)
    return Params(**columns)


def greedy_params(rows: int) -> Params:
    """Parameters of rows that nobody uses: greedy, everything else off."""
    blank = make_params([Sampling.greedy()], [(0, 0)], [0])
    # Not lined up on the host: shapes alone are asked for, too, of any number of rows.
    return jax.tree.map(
        lambda x: jnp.full((rows, *x.shape[1:]), x.flat[0], x.dtype), blank
    )
