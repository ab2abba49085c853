"""Rows of logits, and what a draw may know of the sequence behind each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import validation
from jaxkv.engine.state import TILE, EngineConfig, EngineState
from jaxkv.sampling import Params


class Answer(NamedTuple):
    """What a `logits_fn` may know of the sequences about to get a token."""

    tokens: Int32[Array, "rows max_length"]
    """Prompt and answer so far; meaningless beyond `num_tokens`."""
    num_tokens: Int32[Array, " rows"]
    """Tokens known."""
    prompt_length: Int32[Array, " rows"]
    """How many of them are the prompt."""
    request_id: Int32[Array, " rows"]
    """The caller's names."""


type LogitsFn = Callable[
    [Answer, Float[Array, "rows vocab"]], Float[Array, "rows vocab"]
]
"""Changes logits before penalties and cut-offs: masks, biases, grammars. Beams do not
pass through it, so the facade refuses them beside one."""


def change(
    logits_fn: LogitsFn | None, answer: Answer, raw: Float[Array, "rows vocab"]
) -> Float[Array, "rows vocab"]:
    """Returns the logits as changed by a `logits_fn`; None changes none.

    Raises:
      ValueError: the function returns another shape, or numbers that are not floating.
    """
    if logits_fn is None:
        return raw
    logits: Any = logits_fn(answer, raw)
    found = validation.format_value(logits)
    if isinstance(logits, jax.Array | np.ndarray):
        is_floating = jnp.issubdtype(logits.dtype, jnp.floating)
        if is_floating and logits.shape == raw.shape:
            return logits
        found = f"{logits.dtype}{list(logits.shape)}"
    raise ValueError(
        f"logits_fn returned {found}, and must return "
        f"{raw.dtype}{list(raw.shape)}, the shape of its argument"
    )


class LogitRows(NamedTuple):
    """What a draw needs of every slot, or of every place of one."""

    answer: Answer
    logits: Float[Array, "rows vocab"]
    params: Params
    keep_logprobs: Bool[Array, " rows"]


def look_up(
    state: EngineState,
    logits: Float[Array, "rows vocab"],
    emits: Bool[Array, " slots"],
    width: int = 1,
) -> LogitRows:
    """Gathers what the draws need, for `width` places of each slot."""
    s, row = state.sequences, jnp.maximum(state.slots.sequence, 0)
    # Drafts stand behind the known tokens: each place knows one more of them.
    known = places(state.slots.num_tokens, width)
    row, emits = by_place(row, width), by_place(emits, width)
    params = jax.tree.map(lambda x: x[row], s.params)
    # An idle row must not make a batch look sampled, or scored.
    temperature = jnp.where(emits, params.temperature, 0.0)
    return LogitRows(
        answer=Answer(
            tokens=s.tokens[row],
            num_tokens=known,
            prompt_length=s.prompt_length[row],
            request_id=s.request_id[row],
        ),
        logits=logits,
        params=params._replace(temperature=temperature),
        keep_logprobs=s.keep_logprobs[row] & emits,
    )


def by_place(of_slots: Array, width: int) -> Array:
    """What each slot has, for each of its places."""
    return of_slots if width == 1 else jnp.repeat(of_slots, width)


def places(known: Int32[Array, " slots"], width: int) -> Int32[Array, " rows"]:
    """Where the tokens behind the known ones will stand, those of a slot in order."""
    if width == 1:
        return known
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    return (known[:, None] + index).reshape(-1)


def of_all[T](function: Callable[..., T], rows: Any, config: EngineConfig) -> T:
    """A function of rows, in tiles if bits must not depend on their number."""
    if config.numerics == "fast":
        return function(*rows)
    num = jax.tree.leaves(rows)[0].shape[0]
    short = -num % TILE

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, TILE, *x.shape[1:])

    tiles = lax.map(lambda tile: function(*tile), jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], tiles)
