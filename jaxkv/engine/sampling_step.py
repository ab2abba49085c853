"""Drawing tokens: for every slot whose known tokens are all fed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv.engine import beam_search as engine_beam_search
from jaxkv.engine import groups, model_runner
from jaxkv.engine.state import (
    FINISHED,
    FULL,
    NOBODY,
    NOT_A_NUMBER,
    NOT_ENDED,
    STOPPED,
    TILE,
    EngineConfig,
    EngineState,
)
from jaxkv.memory import page_pool
from jaxkv.sampling import beam_search as sampling_beam_search
from jaxkv.sampling import sampler


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


def emit(
    state: EngineState,
    fed: Bool[Array, " slots"],
    result: model_runner.Fed,
    logits_fn: LogitsFn | None,
    config: EngineConfig,
) -> tuple[EngineState, sampler.Draw, Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Draws a token for every slot that has logits and no known token to feed."""
    s, sequence = state.sequences, state.slots.sequence
    row = jnp.maximum(sequence, 0)
    num_tokens = s.num_tokens[row]
    ready = fed & (state.table.length == num_tokens)
    logits = result.logits[: config.max_slots]

    def choose(logits: Array) -> tuple[Array, Array]:
        if config.numerics == "fast":
            return _choices(logits, config)
        return _in_tiles(lambda x: _choices(x, config), (logits,))

    emits = ready & ~groups.is_beam(state)
    answer = Answer(
        tokens=s.tokens[row],
        num_tokens=num_tokens,
        prompt_length=s.prompt_length[row],
        request_id=s.request_id[row],
    )
    params = jax.tree.map(lambda x: x[row], s.params)
    # An idle row must not make a batch look sampled, or scored.
    params = params._replace(temperature=jnp.where(emits, params.temperature, 0.0))
    scored = s.scored[row] & emits

    def draw_rows(answer, logits, params, scored) -> sampler.Draw:
        raw = logits
        if logits_fn is not None:
            logits = logits_fn(answer, logits)
        logits = sampler.penalise(
            logits, answer.tokens, answer.prompt_length, answer.num_tokens, params
        )
        return sampler.sample(logits, params, answer.num_tokens, raw=raw, scored=scored)

    def draw_all() -> sampler.Draw:
        rows = (answer, logits, params, scored)
        if config.numerics == "fast":
            return draw_rows(*rows)
        return _in_tiles(draw_rows, rows)

    blank = jax.eval_shape(draw_all)
    draw = lax.cond(
        jnp.any(emits),
        draw_all,
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank),
    )
    bad = emits & draw.invalid
    num_emitted = (emits & ~bad).astype(jnp.int32)
    place = jnp.where(num_emitted > 0, num_tokens, NOBODY)
    total = num_tokens + num_emitted
    stops = jnp.any(draw.token[:, None] == s.stop_tokens[row], axis=1)
    reason = jnp.where(total == s.limit[row], FULL, NOT_ENDED)
    reason = jnp.where(stops, STOPPED, reason)
    reason = jnp.where(emits, jnp.where(bad, NOT_A_NUMBER, reason), NOT_ENDED)

    def put(old: Array, index: Any, new: Array) -> Array:
        return page_pool.put(old, index, new, "set")

    now = jnp.broadcast_to(state.clock, (config.max_slots, 2))
    first = emits & ~bad & (num_tokens == s.prompt_length[row])
    ended = jnp.where(reason != NOT_ENDED, sequence, NOBODY)
    logprobs = put(s.logprobs, (sequence, place), draw.logprob.astype(jnp.float32))
    state = state._replace(
        sequences=s._replace(
            tokens=put(s.tokens, (sequence, place), draw.token),
            num_tokens=put(s.num_tokens, sequence, total),
            status=put(s.status, ended, jnp.full_like(ended, FINISHED)),
            reason=put(s.reason, ended, reason),
            first_token=put(s.first_token, jnp.where(first, sequence, NOBODY), now),
            finish=put(s.finish, ended, now),
            logprobs=_score_prompts(logprobs, s, result, config),
            **_alternatives(s, logits, sequence, place, scored, config),
        )
    )
    state, found = engine_beam_search.advance(
        state, result.logits[: config.max_slots], ready, choose, config
    )
    return state, draw, num_emitted, jnp.where(found != NOT_ENDED, found, reason)


def _choices(logits: Float[Array, "rows vocab"], config: EngineConfig) -> Any:
    """`beams.choices`; no beam goes on from logits that are not all finite."""
    sizes = {"max_beams": config.max_beams, "max_stops": config.max_stop_tokens}
    ids, logprobs = sampling_beam_search.choices(logits, **sizes)
    return ids, jnp.where(sampler.is_finite(logits)[:, None], logprobs, jnp.nan)


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
    logprobs, s, result: model_runner.Fed, config: EngineConfig
) -> Array:
    """Keeps the log-probabilities of prompt tokens whose rows were spare logit rows."""
    if config.num_logit_rows == config.max_slots:
        return logprobs
    logits = result.logits[config.max_slots :]
    next_place = result.spare_position + 1
    token = page_pool.take(s.tokens, (result.spare_sequence, next_place), fill=0)
    wanted = result.spare_sequence >= 0
    values = lax.cond(
        jnp.any(wanted),
        lambda: jnp.where(
            sampler.is_finite(logits), sampler.token_logprobs(logits, token), jnp.nan
        ).astype(jnp.float32),
        lambda: jnp.zeros(logits.shape[0], jnp.float32),
    )
    return page_pool.put(logprobs, (result.spare_sequence, next_place), values, "set")


def _alternatives(s, logits, sequence, place, scored, config: EngineConfig) -> dict:
    """Keeps the most likely tokens where they are asked for."""
    if not config.max_logprobs:
        return {}
    rows, num = logits.shape[0], config.max_logprobs
    ids, values = lax.cond(
        jnp.any(scored),
        lambda: sampler.top_logprobs(logits, num),
        lambda: (
            jnp.zeros((rows, num), jnp.int32),
            jnp.zeros((rows, num), logits.dtype),
        ),
    )
    index = (jnp.where(scored, sequence, NOBODY), place)
    return {
        "top_ids": page_pool.put(s.top_ids, index, ids, "set"),
        "top_logprobs": page_pool.put(
            s.top_logprobs, index, values.astype(jnp.float32), "set"
        ),
    }
