"""Logit rows with tokens and sampling parameters of their sequences."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import validation
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.models import ROW_TILE
from jaxkv.sampling import Params


class TokenHistory(NamedTuple):
    """Sequences of the logit rows, the first argument of a `logits_fn`."""

    tokens: Int32[Array, "rows max_length"]
    """Prompt and answer so far; arbitrary from `num_tokens` on."""
    num_tokens: Int32[Array, " rows"]
    """Number of known tokens, prompt included."""
    prompt_length: Int32[Array, " rows"]
    """Prompt length in tokens."""
    request_id: Int32[Array, " rows"]
    """Caller's ids of the requests."""
    grammar_state: Int32[Array, " rows"] | None = None
    """State of the grammar after the known tokens, as in `Sequences`."""


type LogitsFn = Callable[
    [TokenHistory, Float[Array, "rows vocab"]], Float[Array, "rows vocab"]
]
"""Changes logits before penalties and truncation: masks, biases, grammars. It does not
apply to beam search; an `Engine` with a `logits_fn` refuses beam search requests."""


def apply_logits_fn(
    logits_fn: LogitsFn | None, answer: TokenHistory, raw: Float[Array, "rows vocab"]
) -> Float[Array, "rows vocab"]:
    """Applies a `logits_fn` to logits; None returns them unchanged.

    Raises:
      ValueError: the function returns another shape, or a type that is not floating.
    """
    if logits_fn is None:
        return raw
    logits: object = logits_fn(answer, raw)
    shape_text = validation.format_value(logits)
    if isinstance(logits, jax.Array | np.ndarray):
        is_floating = jnp.issubdtype(logits.dtype, jnp.floating)
        if is_floating and logits.shape == raw.shape:
            return logits
        shape_text = f"{logits.dtype}{list(logits.shape)}"
    raise ValueError(
        f"logits_fn returned {shape_text}, and must return "
        f"{raw.dtype}{list(raw.shape)}, the shape of its argument"
    )


class LogitRows(NamedTuple):
    """Inputs of sampling: one row per slot, or `width` rows with speculation."""

    answer: TokenHistory
    logits: Float[Array, "rows vocab"]
    params: Params
    keep_logprobs: Bool[Array, " rows"]


def gather_logit_rows(
    state: EngineState,
    logits: Float[Array, "rows vocab"],
    emits: Bool[Array, " slots"],
    width: int = 1,
) -> LogitRows:
    """Gathers the inputs of sampling for `width` places of each slot."""
    s = state.sequences
    row = jnp.maximum(state.slots.sequence, 0)
    # Drafts follow the known tokens: each place has one more token as known.
    num_tokens = place_positions(state.slots.num_tokens, width)
    row = repeat_places(row, width)
    emits = repeat_places(emits, width)
    params = jax.tree.map(lambda x: x[row], s.params)
    # Idle rows are greedy and without log-probabilities: they must not select a slower
    # program for the batch.
    temperature = jnp.where(emits, params.temperature, 0.0)
    return LogitRows(
        answer=TokenHistory(
            tokens=s.tokens[row],
            num_tokens=num_tokens,
            prompt_length=s.prompt_length[row],
            request_id=s.request_id[row],
            grammar_state=None if s.grammar_state is None else s.grammar_state[row],
        ),
        logits=logits,
        params=params._replace(temperature=temperature),
        keep_logprobs=s.keep_logprobs[row] & emits,
    )


def repeat_places(of_slots: Array, width: int) -> Array:
    """Repeats values of slots for each of their places."""
    return of_slots if width == 1 else jnp.repeat(of_slots, width)


def place_positions(
    num_tokens: Int32[Array, " slots"], width: int
) -> Int32[Array, " rows"]:
    """Returns the positions of the `width` tokens after the known ones of each slot."""
    if width == 1:
        return num_tokens
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    return (num_tokens[:, None] + index).reshape(-1)


def map_rows[T](function: Callable[..., T], rows: tuple, config: EngineConfig) -> T:
    """Applies a function to rows; reproducible numerics use tiles of `ROW_TILE`."""
    if config.numerics == "fast":
        return function(*rows)
    num = jax.tree.leaves(rows)[0].shape[0]
    short = -num % ROW_TILE

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, ROW_TILE, *x.shape[1:])

    tiles = lax.map(lambda tile: function(*tile), jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], tiles)
