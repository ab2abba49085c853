"""The sampling step: samples a token for each slot whose known tokens are all fed.

With speculation a slot may emit several tokens: the accepted drafts and one more. Each
of its places is then judged as if all tokens before it were known.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from jaxkv import arrays, sampling
from jaxkv.engine import beam_search as engine_beam_search
from jaxkv.engine import groups, model_runner
from jaxkv.engine.drafting import Drafts, Speculation, VerifyOutput
from jaxkv.engine.emitting import logit_rows, verification
from jaxkv.engine.emitting.logit_rows import (
    LogitRows,
    LogitsFn,
    place_positions,
    repeat_places,
)
from jaxkv.engine.state import (
    ALL_KINDS,
    FINISH_REASONS,
    LENGTH_REACHED,
    NOT_A_NUMBER,
    NOT_ENDED,
    STOPPED,
    EngineConfig,
    EngineState,
    RequestKinds,
    Sequences,
)
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.sampling import Draw, is_finite, is_plain, token_logprobs, top_logprobs


class SamplerOutput(NamedTuple):
    """Tokens emitted by the slots."""

    tokens: Int32[Array, "slots emit_width"]
    """Tokens of each slot in order; arbitrary from `num_emitted` on."""
    logprobs: Float[Array, "slots emit_width"]
    """Log-probabilities under the raw logits, where requested; else 0."""
    num_emitted: Int32[Array, " slots"]
    """Number of emitted tokens."""
    begins: Bool[Array, " slots"]
    """Slots whose sequence got its first token."""
    reason: Int32[Array, " slots"]
    """Finish reason of each slot's sequence, or `NOT_ENDED`."""
    verified: VerifyOutput | None = None
    """Results of verification; None without speculation."""


class _Candidates(NamedTuple):
    """Candidate tokens of the slots, before stop conditions are applied."""

    tokens: Int32[Array, " rows"]
    """Tokens in order of slots, `emit_width` for each."""
    logprobs: Float[Array, " rows"]
    num: Int32[Array, " slots"] | None
    """Number of tokens, arbitrary in slots that do not emit. None: one token, none if
    it is invalid."""
    invalid: Bool[Array, " slots"]
    """Slots without a valid token after these."""
    keep_logprobs: Bool[Array, " rows"]
    """True if log-probabilities are kept."""
    logits: Callable[[], Float[Array, "rows vocab"]]
    """Returns the raw logits of each token."""
    verified: VerifyOutput | None = None


def emit(
    state: EngineState,
    fed: Bool[Array, " slots"],
    result: model_runner.ModelOutput,
    logits_fn: LogitsFn | None,
    config: EngineConfig,
    speculation: Speculation | None = None,
    drafts: Drafts | None = None,
    kinds: RequestKinds = ALL_KINDS,
) -> tuple[EngineState, SamplerOutput]:
    """Samples for each slot that has logits and no known token left to feed.

    Args:
      state: the engine, with the rows of this step counted as written, drafts excluded.
      fed: slots that fed tokens or were forked.
      result: output of the model; arbitrary in slots that `fed` does not mark.
      logits_fn: changes logits before sampling.
      config: the engine's configuration.
      speculation: drafter and verifier.
      drafts: the drafts, which were fed after the known tokens.
      kinds: kinds of requests in the slots.

    Returns:
      The new state, and the emitted tokens.
    """
    num_tokens = state.slots.num_tokens
    ready = fed & (state.table.position == num_tokens)
    emits = ready & ~groups.is_beam(state)
    logits = result.logits[: config.max_slots]
    if speculation is None or drafts is None:
        rows = logit_rows.gather_logit_rows(state, logits, emits)
        draw = _sample(rows, emits, logits_fn, config, kinds.sampled)
        candidates = _Candidates(
            draw.token,
            draw.logprob,
            None,
            draw.invalid,
            rows.keep_logprobs,
            logits=lambda: logits,
        )
    else:
        judged = verification.verify(
            state, result, emits, drafts, speculation, logits_fn, config
        )
        is_tree = drafts.tree is not None
        candidates = _from_verification(state, judged, emits, is_tree, result, config)
    state, emitted = _append_tokens(state, candidates, emits)
    # Log-probabilities of the emitted tokens, of prompts, and of alternatives.
    s = state.sequences
    width = config.emit_width
    sequence = repeat_places(state.slots.sequence, width)
    place = place_positions(num_tokens, width)
    counts = place < repeat_places(num_tokens + emitted.num_emitted, width)
    place = jnp.where(counts, place, NO_SEQUENCE)
    logprobs = emitted.logprobs.reshape(-1).astype(jnp.float32)
    logprobs = arrays.put(s.logprobs, (sequence, place), logprobs)
    s = s._replace(logprobs=_score_prompts(logprobs, s, result, config))
    at = jnp.where(candidates.keep_logprobs, sequence, NO_SEQUENCE), place
    s = _store_alternatives(s, candidates, at, result, config)
    state = state._replace(sequences=s)

    def choices(logits: Array) -> tuple[Array, Array]:
        sizes = {"max_beams": config.max_beams, "max_stops": config.max_stop_tokens}
        ids, logprobs = sampling.choices(logits, **sizes)
        # A beam with logits that are not finite has no continuation.
        finite = is_finite(logits)[:, None]
        return ids, jnp.where(finite, logprobs, jnp.nan)

    def choose(logits: Array) -> tuple[Array, Array]:
        return logit_rows.map_rows(choices, (logits,), config)

    state, beam_reason = engine_beam_search.step_beams(
        state, logits, ready, choose, config
    )
    ended = beam_reason != NOT_ENDED
    reason = jnp.where(ended, beam_reason, emitted.reason)
    # The answers of a beam search are available only at its end.
    return state, emitted._replace(reason=reason, begins=emitted.begins | ended)


def _from_verification(
    state: EngineState,
    judged: verification.Continuation,
    emits: Bool[Array, " slots"],
    is_tree: bool,
    result: model_runner.ModelOutput,
    config: EngineConfig,
) -> _Candidates:
    """Returns the tokens of verified drafts, with requested log-probabilities."""
    path = judged.verified.path if is_tree else None
    logits = functools.partial(verification.token_logits, result, path, config)
    tokens = judged.tokens.reshape(-1)
    keep_logprobs = (
        state.sequences.keep_logprobs[jnp.maximum(state.slots.sequence, 0)] & emits
    )
    keep_logprobs = repeat_places(keep_logprobs, config.emit_width)
    zeros = jnp.zeros(tokens.shape, sampling.wide(result.logits[:, 0]).dtype)
    draft_logprobs = lax.cond(
        jnp.any(keep_logprobs),
        lambda: token_logprobs(logits(), tokens),
        lambda: zeros,
    )
    logprobs = jnp.where(keep_logprobs, draft_logprobs, zeros)
    fields = tokens, logprobs, judged.num, judged.invalid, keep_logprobs
    return _Candidates(*fields, logits, judged.verified)


def _sample(
    rows: LogitRows,
    emits: Bool[Array, " slots"],
    logits_fn: LogitsFn | None,
    config: EngineConfig,
    may_sample: bool,
) -> Draw:
    """Samples a token for each row; skipped if no slot emits."""
    asks = emits & ~is_plain(rows.params, rows.keep_logprobs)
    any_emits, any_asks = arrays.any_of(emits, asks)

    def of_rows(*leaves: PyTree[Array]) -> Draw:
        answer, raw, params, keep_logprobs = leaves
        logits = logit_rows.apply_logits_fn(logits_fn, answer, raw)

        def draw_all() -> Draw:
            num_tokens = answer.num_tokens
            changed = sampling.penalise(
                logits, answer.tokens, answer.prompt_length, num_tokens, params
            )
            is_raw = config.logprobs_mode == "raw_logprobs"
            draw = sampling.sample(
                changed,
                params,
                num_tokens,
                raw=raw,
                keep_logprobs=keep_logprobs & is_raw,
            )
            if is_raw:
                return draw
            logprob = lax.cond(
                jnp.any(keep_logprobs),
                lambda: sampling.draw_logprobs(changed, draw.token, params),
                lambda: draw.logprob,
            )
            return draw._replace(logprob=jnp.where(keep_logprobs, logprob, 0))

        if not may_sample:
            return sampling.greedy(logits, raw=raw)
        with jax.named_scope("asked"):
            return lax.cond(
                any_asks, draw_all, lambda: sampling.greedy(logits, raw=raw)
            )

    def of_all() -> Draw:
        return logit_rows.map_rows(of_rows, rows, config)

    with jax.named_scope("draw"):
        shapes = jax.eval_shape(of_all)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(any_emits, of_all, lambda: blank)


def _append_tokens(
    state: EngineState, candidates: _Candidates, emits: Bool[Array, " slots"]
) -> tuple[EngineState, SamplerOutput]:
    """Appends tokens up to the first stop condition, and sets finish reasons."""
    s = state.sequences
    sequence = state.slots.sequence
    row = jnp.maximum(sequence, 0)
    num_tokens = state.slots.num_tokens
    width = candidates.tokens.shape[0] // row.shape[0]
    place = place_positions(num_tokens, width)
    owner = repeat_places(row, width)
    stops = jnp.any(candidates.tokens[:, None] == s.stop_tokens[owner], axis=1)
    if candidates.num is None:
        counts = emits & ~candidates.invalid
        num = counts.astype(jnp.int32)
        full = num_tokens + num == s.limit[row]
        why = jnp.where(stops, STOPPED, jnp.where(full, LENGTH_REACHED, NOT_ENDED))
        why = jnp.where(candidates.invalid, NOT_A_NUMBER, why)
        reason = jnp.where(emits, why, NOT_ENDED)
    else:
        full = place + 1 == s.limit[owner]
        why = jnp.where(stops, STOPPED, jnp.where(full, LENGTH_REACHED, NOT_ENDED))
        # The first stop condition and its reason, packed in one integer.
        why = why.reshape(row.shape[0], -1)
        num = jnp.where(emits, candidates.num, 0)
        index = jnp.arange(width, dtype=jnp.int32)[None, :]
        ends = (why != NOT_ENDED) & (index < num[:, None])
        code = index * len(FINISH_REASONS) + why
        no_end = width * len(FINISH_REASONS) + NOT_ENDED
        first = jnp.min(jnp.where(ends, code, no_end), axis=1)
        num = jnp.minimum(num, first // len(FINISH_REASONS) + 1)
        reason = first % len(FINISH_REASONS)
        broken = emits & candidates.invalid & (reason == NOT_ENDED)
        reason = jnp.where(broken, NOT_A_NUMBER, reason)
        counts = place < repeat_places(num_tokens + num, width)
    at = (repeat_places(sequence, width), jnp.where(counts, place, NO_SEQUENCE))
    begins = (num > 0) & (num_tokens == s.prompt_length[row])
    s = s._replace(tokens=arrays.put(s.tokens, at, candidates.tokens))
    slots = state.slots._replace(num_tokens=num_tokens + num)
    state = state._replace(sequences=s).with_slots(slots)
    tokens, logprobs = (
        x.reshape(-1, width) for x in (candidates.tokens, candidates.logprobs)
    )
    return state, SamplerOutput(
        tokens, logprobs, num, begins, reason, candidates.verified
    )


def _score_prompts(
    logprobs: Float[Array, "sequences max_length"],
    s: Sequences,
    result: model_runner.ModelOutput,
    config: EngineConfig,
) -> Float[Array, "sequences max_length"]:
    """Stores the log-probabilities of prompt tokens, from the spare logit rows."""
    if config.num_logit_rows == config.max_slots:
        return logprobs
    logits = result.logits[config.max_slots :]
    at = (result.spare_sequence, result.spare_position + 1)
    token = arrays.take(s.tokens, at, fill=0)

    def of_all() -> Array:
        logprobs = token_logprobs(logits, token)
        logprobs = jnp.where(is_finite(logits), logprobs, jnp.nan)
        return logprobs.astype(jnp.float32)

    values = lax.cond(
        jnp.any(result.spare_sequence >= 0),
        of_all,
        lambda: jnp.zeros(logits.shape[0], jnp.float32),
    )
    return arrays.put(logprobs, at, values)


def _store_alternatives(
    s: Sequences,
    candidates: _Candidates,
    at: tuple[Int32[Array, " rows"], Int32[Array, " rows"]],
    result: model_runner.ModelOutput,
    config: EngineConfig,
) -> Sequences:
    """Stores the most likely tokens where requested, also at prompt positions."""
    if not config.max_logprobs:
        return s

    def top(is_wanted: Array, logits: Callable[[], Array]) -> tuple[Array, Array]:
        def of_all() -> tuple[Array, Array]:
            return top_logprobs(logits(), config.max_logprobs)

        shapes = jax.eval_shape(of_all)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(jnp.any(is_wanted), of_all, lambda: blank)

    alternatives = *at, *top(candidates.keep_logprobs, candidates.logits)
    if config.num_logit_rows > config.max_slots:
        reader = result.spare_sequence
        keep_logprobs = arrays.take(s.keep_logprobs, reader, fill=False)
        prompt_alternatives = (
            jnp.where(keep_logprobs, reader, NO_SEQUENCE),
            result.spare_position + 1,
        )
        prompt_alternatives = (
            *prompt_alternatives,
            *top(keep_logprobs, lambda: result.logits[config.max_slots :]),
        )
        # One write for both, since each `put` is a kernel launch.
        alternatives = tuple(
            jnp.concatenate(pair)
            for pair in zip(alternatives, prompt_alternatives, strict=True)
        )
    sequence, place, ids, values = alternatives
    return s._replace(
        top_ids=arrays.put(s.top_ids, (sequence, place), ids),
        top_logprobs=arrays.put(
            s.top_logprobs, (sequence, place), values.astype(jnp.float32)
        ),
    )
