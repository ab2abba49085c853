"""The sampling step: a token for every slot whose known tokens are all fed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays
from jaxkv.engine import beam_search as engine_beam_search
from jaxkv.engine import groups, model_runner
from jaxkv.engine.state import (
    FULL,
    NOBODY,
    NOT_A_NUMBER,
    NOT_ENDED,
    STOPPED,
    TILE,
    EngineConfig,
    EngineState,
    Sequences,
)
from jaxkv.sampling import Params, sampler, top_k
from jaxkv.sampling import beam_search as sampling_beam_search


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


class Emitted(NamedTuple):
    """What the slots drew."""

    draw: sampler.Draw
    """A draw for every slot; of those that emit nothing it means nothing."""
    num_emitted: Int32[Array, " slots"]
    """How many of the tokens count."""
    reason: Int32[Array, " slots"]
    """Why each slot's sequence has ended, or NOT_ENDED."""


class _Rows(NamedTuple):
    """What a draw needs of every slot."""

    answer: Answer
    logits: Float[Array, "rows vocab"]
    params: Params
    scored: Bool[Array, " rows"]


def emit(
    state: EngineState,
    fed: Bool[Array, " slots"],
    result: model_runner.Fed,
    logits_fn: LogitsFn | None,
    config: EngineConfig,
) -> tuple[EngineState, Emitted]:
    """Draws a token for every slot that has logits and no known token to feed.

    The rows of this step are counted as written. `fed` marks slots that fed something,
    or were forked; `result` has their logits, of any other slot anything.

    Returns:
      The new state, and what was drawn.
    """
    known = state.sequences.num_tokens[jnp.maximum(state.slots.sequence, 0)]
    ready = fed & (state.table.length == known)
    emits = ready & ~groups.is_beam(state)
    rows = _look_up(state, result.logits[: config.max_slots], emits)
    draw = _draw(rows, emits, logits_fn, config)
    state, emitted = _note(state, rows, draw, emits)
    state = _score(state, rows, result, emitted, config)

    def choose(logits: Array) -> tuple[Array, Array]:
        if config.numerics == "fast":
            return _choices(logits, config)
        return _in_tiles(lambda x: _choices(x, config), (logits,))

    state, found = engine_beam_search.advance(state, rows.logits, ready, choose, config)
    reason = jnp.where(found != NOT_ENDED, found, emitted.reason)
    return state, emitted._replace(reason=reason)


def _look_up(
    state: EngineState,
    logits: Float[Array, "slots vocab"],
    emits: Bool[Array, " slots"],
) -> _Rows:
    """Gathers what the draws need."""
    s, row = state.sequences, jnp.maximum(state.slots.sequence, 0)
    params = jax.tree.map(lambda x: x[row], s.params)
    # An idle row must not make a batch look sampled, or scored.
    temperature = jnp.where(emits, params.temperature, 0.0)
    return _Rows(
        answer=Answer(
            tokens=s.tokens[row],
            num_tokens=s.num_tokens[row],
            prompt_length=s.prompt_length[row],
            request_id=s.request_id[row],
        ),
        logits=logits,
        params=params._replace(temperature=temperature),
        scored=s.scored[row] & emits,
    )


def _draw(
    rows: _Rows,
    emits: Bool[Array, " slots"],
    logits_fn: LogitsFn | None,
    config: EngineConfig,
) -> sampler.Draw:
    """Draws for all rows, if anybody draws at all."""
    asks = emits & ~sampler.is_plain(rows.params, rows.scored)
    any_emits, any_asks = arrays.any_of(emits, asks)

    def of_rows(*leaves: Any) -> sampler.Draw:
        answer, raw, params, scored = leaves
        logits = raw if logits_fn is None else logits_fn(answer, raw)

        def asked() -> sampler.Draw:
            known = answer.num_tokens
            changed = sampler.penalise(
                logits, answer.tokens, answer.prompt_length, known, params
            )
            return sampler.sample(changed, params, known, raw=raw, scored=scored)

        with jax.named_scope("asked"):
            return lax.cond(any_asks, asked, lambda: sampler.greedy(logits, raw=raw))

    def of_all() -> sampler.Draw:
        if config.numerics == "fast":
            return of_rows(*rows)
        return _in_tiles(of_rows, tuple(rows))

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_all))
    with jax.named_scope("draw"):
        return lax.cond(any_emits, of_all, lambda: blank)


def _note(
    state: EngineState,
    rows: _Rows,
    draw: sampler.Draw,
    emits: Bool[Array, " slots"],
) -> tuple[EngineState, Emitted]:
    """Appends the tokens, and says who has ended, and why."""
    s, sequence, known = state.sequences, state.slots.sequence, rows.answer.num_tokens
    row = jnp.maximum(sequence, 0)
    counts = emits & ~draw.invalid
    total = known + counts.astype(jnp.int32)
    stops = jnp.any(draw.token[:, None] == s.stop_tokens[row], axis=1)
    reason = jnp.where(total == s.limit[row], FULL, NOT_ENDED)
    reason = jnp.where(stops, STOPPED, reason)
    reason = jnp.where(draw.invalid, NOT_A_NUMBER, reason)
    reason = jnp.where(emits, reason, NOT_ENDED)
    at = (sequence, jnp.where(counts, known, NOBODY))
    slot = arrays.namers(sequence, s.num_tokens.shape[0])
    num_tokens = arrays.take(total, slot, fill=0)
    s = s._replace(
        tokens=arrays.put(s.tokens, at, draw.token),
        num_tokens=jnp.where(slot >= 0, num_tokens, s.num_tokens),
    )
    begins = counts & (known == rows.answer.prompt_length)
    state = state._replace(sequences=s)
    state = groups.note_ends(state, begins, reason != NOT_ENDED, reason)
    return state, Emitted(draw, counts.astype(jnp.int32), reason)


def _score(
    state: EngineState,
    rows: _Rows,
    result: model_runner.Fed,
    emitted: Emitted,
    config: EngineConfig,
) -> EngineState:
    """Keeps log-probabilities: of what was drawn, of alternatives, and of prompts."""
    s, sequence = state.sequences, state.slots.sequence
    place = jnp.where(emitted.num_emitted > 0, rows.answer.num_tokens, NOBODY)
    drawn = emitted.draw.logprob.astype(jnp.float32)
    logprobs = arrays.put(s.logprobs, (sequence, place), drawn)
    s = s._replace(logprobs=_score_prompts(logprobs, s, result, config))
    scored = jnp.where(rows.scored, sequence, NOBODY)
    s = _with_alternatives(s, rows, (scored, place), config)
    return state._replace(sequences=s)


def _choices(logits: Float[Array, "rows vocab"], config: EngineConfig) -> Any:
    """`beam_search.choices`; no beam goes on from logits that are not all finite."""
    sizes = {"max_beams": config.max_beams, "max_stops": config.max_stop_tokens}
    ids, logprobs = sampling_beam_search.choices(logits, **sizes)
    return ids, jnp.where(top_k.is_finite(logits)[:, None], logprobs, jnp.nan)


def _in_tiles(function: Callable, rows: Any) -> Any:
    """Maps `function` over tiles of exactly `TILE` rows."""
    num = jax.tree.leaves(rows)[0].shape[0]
    short = -num % TILE

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, TILE, *x.shape[1:])

    tiles = lax.map(lambda tile: function(*tile), jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], tiles)


def _score_prompts(
    logprobs: Float[Array, "sequences max_length"],
    s: Sequences,
    result: model_runner.Fed,
    config: EngineConfig,
) -> Float[Array, "sequences max_length"]:
    """Keeps the log-probabilities of prompt tokens whose rows were spare logit rows."""
    if config.num_logit_rows == config.max_slots:
        return logprobs
    logits = result.logits[config.max_slots :]
    at = (result.spare_sequence, result.spare_position + 1)
    token = arrays.take(s.tokens, at, fill=0)

    def of_all() -> Array:
        found = sampler.token_logprobs(logits, token)
        found = jnp.where(top_k.is_finite(logits), found, jnp.nan)
        return found.astype(jnp.float32)

    values = lax.cond(
        jnp.any(result.spare_sequence >= 0),
        of_all,
        lambda: jnp.zeros(logits.shape[0], jnp.float32),
    )
    return arrays.put(logprobs, at, values)


def _with_alternatives(
    s: Sequences,
    rows: _Rows,
    at: tuple[Int32[Array, " slots"], Int32[Array, " slots"]],
    config: EngineConfig,
) -> Sequences:
    """Keeps the most likely tokens where they are asked for."""
    if not config.max_logprobs:
        return s
    logits, shape = rows.logits, (config.max_slots, config.max_logprobs)
    ids, values = lax.cond(
        jnp.any(rows.scored),
        lambda: sampler.top_logprobs(logits, config.max_logprobs),
        lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits.dtype)),
    )
    return s._replace(
        top_ids=arrays.put(s.top_ids, at, ids),
        top_logprobs=arrays.put(s.top_logprobs, at, values.astype(jnp.float32)),
    )
