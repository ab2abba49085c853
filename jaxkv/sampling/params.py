"""Sampling parameters of a request: validated on the host, arrays on the device."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32, UInt32

from jaxkv import validation
from jaxkv.sampling.grammars import Grammar

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)

type _Check = Callable[[str, object], Any]
"""Takes a field's name and value; returns the value, or raises a ValueError."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters and stopping conditions of one request."""

    temperature: float = 1.0
    """Divisor of the logits, finite, at least 0; 0 takes the most likely token."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    top_p: float = 1.0
    """Probability that the kept tokens reach, in (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """Smallest probability kept, as a fraction of the largest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that occur in
    the prompt or the answer, above 0; 1 has no effect."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the answer, finite."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit for each occurrence of its token in the answer, finite.
    """
    seed: int | None = None
    """Seed of the draws, in [0, 2**64), independent of the engine's seed and the
    request's id; None derives the draws from these two."""
    n: int = 1
    """Number of answers, at least 1, drawn independently. They share the pages of the
    prompt, which is prefilled once."""
    best_of: int | None = None
    """Number of answers drawn, at least `n`, of which the `n` most likely are returned;
    None draws `n`."""
    beam_width: int | None = None
    """Number of beams of a beam search, at least `n`, which returns the `n` best
    answers; None samples."""
    length_penalty: float = 1.0
    """For a beam search: the score of an answer is its log-probability divided by its
    length to this power, in [-10, 10]."""
    early_stopping: bool | str = False
    """When a beam search with enough answers ends: True at once; False when the best
    beam is unlikely to improve them; "never" when no beam can improve them."""
    max_tokens: int = 64
    """Number of tokens after which the answer ends, at least 1."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, none of them empty."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """True if the answer continues after the model's own end token."""
    logprobs: int | None = None
    """Number of alternatives reported with each token's log-probability, at least 0;
    None reports neither."""
    prompt_logprobs: bool = False
    """True if log-probabilities of the prompt's tokens are reported too, with the
    alternatives of `logprobs`."""

    grammar: Grammar | None = None
    """Grammar that answers must match; None leaves them free. An answer that reaches
    `max_tokens` is cut off. Stop strings and `stop_tokens` may end an answer early."""
    prefix_cache: bool = True
    """True if the request may use cached pages of its first tokens, and cache its own;
    the result is the same either way."""
    salt: int = 0
    """Cached pages are shared only among requests of the same salt, in [0, 2**32), or
    [0, 2**24) in an engine with adapters."""
    adapter: str | None = None
    """Name of the LoRA adapter that answers, one of `Engine.adapters`; None takes the
    model's weights."""

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
          ValueError: a field is out of its range; the message has the field and its
            value.
        """
        for name, check in _CHECKS.items():
            # Accepted numbers become Python numbers, also those of NumPy.
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
            or self.grammar is not None
        )
        if self.beam_width is not None and asks_more:
            raise ValueError(
                "beam search takes no best_of, penalties, logprobs, stop strings or "
                "grammar"
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the request."""
        if self.beam_width is not None:
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    @classmethod
    def greedy(cls, **fields: Any) -> "Sampling":
        """Returns parameters of greedy decoding; `fields` sets the remaining fields."""
        return cls(temperature=0.0, **fields)


def _count(low: int = 0, hint: str = "", below: int = validation.INT32) -> _Check:
    return lambda name, value: validation.integer(
        name, value, low=low, below=below, hint=hint
    )


def _grammar(name: str, value: object) -> object:
    validation.instance(name, value, Grammar, type(None))
    return value


def _number(low: float, high: float, hint: str) -> _Check:
    return lambda name, value: validation.number(
        name, value, low=low, high=high, hint=hint
    )


def _or_none(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, tuple) and all(isinstance(x, str) and x for x in value):
        with contextlib.suppress(UnicodeEncodeError):
            "".join(value).encode()
            return value
    raise ValueError(
        f"{name}={validation.format_value(value)} must be a tuple of strings of valid "
        "Unicode, none of them empty"
    )


def _name(name: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"{name}={validation.format_value(value)} must be a name or None")


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    refused = f"{name}={validation.format_value(value)} must be a tuple of token ids"
    if not isinstance(value, tuple):
        raise ValueError(refused)
    try:
        return tuple(validation.integer(name, token) for token in value)
    except ValueError:
        raise ValueError(refused) from None


_ANY = _number(-_MAX_FLOAT32, _MAX_FLOAT32, "finite")
_CHECKS: dict[str, _Check] = {
    "temperature": _number(0.0, _MAX_FLOAT32, ">= 0 and finite"),
    "top_k": _count(hint="a count, or 0 for off"),
    "top_p": _number(math.ulp(0.0), 1.0, "in (0, 1]"),
    "min_p": _number(0.0, 1.0, "in [0, 1]"),
    "repetition_penalty": _number(_SMALLEST, _MAX_FLOAT32, "above 0 and finite"),
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
    "grammar": _grammar,
    "prefix_cache": validation.boolean,
    "salt": _count(below=2**32),
    "adapter": _or_none(_name),
}
"""Check of each field of `Sampling`."""


class Params(NamedTuple):
    """Sampling parameters of each row, as arrays. Ranges as in `Sampling`."""

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    key: UInt32[Array, "rows 2"]
    """Key of the row's request, see `request_key`."""
    sample: Int32[Array, " rows"]
    """Index of the row's answer within its request, from 0."""


def make_params(
    requests: Sequence[Sampling],
    keys: Sequence[ArrayLike | tuple[int, int]],
    samples: Sequence[int],
) -> Params:
    """Stacks the parameters of several sequences as NumPy arrays, one row each.

    Args:
      requests: parameters of the request of each sequence.
      keys: key of the request of each sequence, see `request_key`.
      samples: index of each sequence within its request.
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
        field: np.array([getattr(request, name) for request in requests], kind)
        for field, (name, kind) in fields.items()
    }
    columns["key"] = np.array(keys, np.uint32).reshape(len(requests), 2)
    columns["sample"] = np.array(samples, np.int32)
    return Params(**columns)


@validation.checks_numbers(rows=0)
def greedy_params(rows: int) -> Params:
    """Returns parameters of unused rows: greedy, without penalties or cut-offs."""
    blank = make_params([Sampling.greedy()], [(0, 0)], [0])
    # Not stacked on the host, since callers also need the shapes of any number of rows.
    return jax.tree.map(
        lambda x: jnp.full((rows, *x.shape[1:]), x.flat[0], x.dtype), blank
    )
