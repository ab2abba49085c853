"""The sampling step: a token for every slot whose known tokens are all fed.

With speculation there may be several: the drafts that the verifier accepts, and one
more. Then each slot has several places, and the law of each is asked as if all tokens
before it were known.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays
from jaxkv.engine import beam_search as engine_beam_search
from jaxkv.engine import drafting, groups, model_runner
from jaxkv.engine.drafting import Drafts, Speculation, Tree, Verified
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
from jaxkv.sampling import Params, random_keys, sampler, top_k
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

    tokens: Int32[Array, "slots emit_width"]
    """Tokens of every slot, in order; those that do not count mean nothing."""
    logprobs: Float[Array, "slots emit_width"]
    """Their log-probabilities under the raw logits, where asked for; else 0."""
    num_emitted: Int32[Array, " slots"]
    """How many of the tokens count."""
    reason: Int32[Array, " slots"]
    """Why each slot's sequence has ended, or NOT_ENDED."""
    verified: Verified | None = None
    """With speculation, what became of the drafts."""


class _Drawn(NamedTuple):
    """What could follow the known tokens of every slot, ends apart."""

    tokens: Int32[Array, " rows"]
    """Those of a slot side by side, `emit_width` each."""
    logprobs: Float[Array, " rows"]
    num: Int32[Array, " slots"] | None
    """How many tokens follow; of slots that emit nothing any number. None: one, if it
    is valid."""
    invalid: Bool[Array, " slots"]
    """Slots of which nothing can be drawn behind these."""
    verified: Verified | None = None


class _Rows(NamedTuple):
    """What a draw needs of every slot, or of every place of one."""

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
    speculation: Speculation | None = None,
    drafts: Drafts | None = None,
    tree: Tree | None = None,
) -> tuple[EngineState, Emitted]:
    """Draws for every slot that has logits and no known token to feed.

    The rows of this step are counted as written, drafts apart. `fed` marks slots that
    fed something, or were forked; `result` has their logits, of any other slot
    anything. With speculation, the `drafts` stand behind the known tokens, and were
    fed, as a `tree` if there is one.

    Returns:
      The new state, and what was drawn.
    """
    known = state.sequences.num_tokens[jnp.maximum(state.slots.sequence, 0)]
    ready = fed & (state.table.length == known)
    emits = ready & ~groups.is_beam(state)
    logits, width = result.logits[: config.max_slots], config.emit_width
    if speculation is None or drafts is None:
        rows = _look_up(state, logits, emits)
        draw = _draw(rows, emits, logits_fn, config)
        drawn = _Drawn(draw.token, draw.logprob, None, draw.invalid)
    else:
        rows = _look_up(state, _of_places(result.logits, config), emits, width)
        rows, drawn = _verify(rows, emits, drafts, tree, speculation, logits_fn, config)
    state, emitted = _note(state, drawn, emits)
    state = _score(state, rows, result, emitted, known, config)

    def choose(logits: Array) -> tuple[Array, Array]:
        if config.numerics == "fast":
            return _choices(logits, config)
        return _in_tiles(lambda x: _choices(x, config), (logits,))

    state, found = engine_beam_search.advance(state, logits, ready, choose, config)
    reason = jnp.where(found != NOT_ENDED, found, emitted.reason)
    return state, emitted._replace(reason=reason)


def _of_places(
    logits: Float[Array, "logit_rows vocab"], config: EngineConfig
) -> Float[Array, "rows vocab"]:
    """The logits of all places, those of a slot side by side."""
    last = logits[: config.max_slots, None]
    drafts = logits[config.num_logit_rows :].reshape(
        config.max_slots, config.max_drafts, -1
    )
    return jnp.concatenate([last, drafts], axis=1).reshape(-1, logits.shape[1])


def _look_up(
    state: EngineState,
    logits: Float[Array, "rows vocab"],
    emits: Bool[Array, " slots"],
    width: int = 1,
) -> _Rows:
    """Gathers what the draws need, for `width` places of each slot."""
    s, row = state.sequences, jnp.maximum(state.slots.sequence, 0)
    # Drafts stand behind the known tokens: each place knows one more of them.
    known = _places(s.num_tokens[row], width)
    row, emits = _by_place(row, width), _by_place(emits, width)
    params = jax.tree.map(lambda x: x[row], s.params)
    # An idle row must not make a batch look sampled, or scored.
    temperature = jnp.where(emits, params.temperature, 0.0)
    return _Rows(
        answer=Answer(
            tokens=s.tokens[row],
            num_tokens=known,
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

    with jax.named_scope("draw"):
        return _if_any(any_emits, of_rows, rows, config)


def _if_any[T](
    wanted: Bool[Array, ""],
    of_rows: Callable[..., T],
    rows: Any,
    config: EngineConfig,
) -> T:
    """A function of rows, in tiles if bits must not depend on their number; else 0."""

    def of_all() -> T:
        if config.numerics == "fast":
            return of_rows(*rows)
        return _in_tiles(of_rows, rows)

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_all))
    return lax.cond(wanted, of_all, lambda: blank)


def _verify(
    rows: _Rows,
    emits: Bool[Array, " slots"],
    drafts: Drafts,
    tree: Tree | None,
    speculation: Speculation,
    logits_fn: LogitsFn | None,
    config: EngineConfig,
) -> tuple[_Rows, _Drawn]:
    """Judges the drafts of every slot, and draws what follows the accepted ones.

    Returns:
      The rows in the order of the tokens that they give; and what was drawn.
    """
    shape = drafts.num.shape[0], config.emit_width
    slot = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
    answer = rows.answer if tree is None else _by_branch(rows.answer, drafts, tree)
    child = drafting.children(drafts, speculation.drafter.width)
    token = arrays.take(drafts.tokens, (slot[:, :, None], child - 1), fill=-1)

    def of_rows(
        answer: Answer, raw: Array, params: Params, children: Array, law: Array | None
    ) -> Any:
        known = answer.num_tokens
        logits = raw if logits_fn is None else logits_fn(answer, raw)
        logits = sampler.penalise(
            logits, answer.tokens, answer.prompt_length, known, params
        )
        ruling = speculation.verifier(logits, children, law, params, known, raw)
        return ruling, _flip(ruling.accept, params, known)

    law, token = drafts.law, token.reshape(-1, token.shape[2])
    law = None if law is None else law.reshape(token.shape[0], -1)
    judged = answer, rows.logits, rows.params, token, law
    with jax.named_scope("verify"):
        ruling, accepts = _if_any(jnp.any(emits), of_rows, judged, config)
        accepted, path = _walk(child, accepts.reshape(child.shape), drafts, tree)
    follows, invalid = (x.reshape(shape) for x in (ruling.token, ruling.invalid))
    # The place that each token follows, and in the end the last one.
    places = jnp.concatenate([jnp.zeros_like(slot), path], axis=1)
    if tree is not None:
        order = (slot * shape[1] + places).reshape(-1)
        rows = rows._replace(logits=rows.logits[order])
    last = jnp.arange(shape[1], dtype=jnp.int32)[None, :] == accepted[:, None]
    end = last & jnp.take_along_axis(invalid, places, axis=1)
    tokens = arrays.take(drafts.tokens, (slot, path - 1), fill=0)
    tokens = jnp.maximum(jnp.pad(tokens, ((0, 0), (0, 1))), 0)
    tokens = jnp.where(last, jnp.take_along_axis(follows, places, axis=1), tokens)
    tokens, invalid = tokens.reshape(-1), jnp.any(end, axis=1)
    return rows, _Drawn(
        tokens=tokens,
        logprobs=_logprobs(rows, tokens),
        num=accepted + (~invalid).astype(jnp.int32),
        invalid=invalid,
        verified=Verified(drafts.num, accepted, path, follows, emits),
    )


def _by_branch(answer: Answer, drafts: Drafts, tree: Tree) -> Answer:
    """What each place of a tree knows: the tokens on the way to it."""
    num_slots, num = drafts.tokens.shape
    width = num + 1
    known = answer.num_tokens.reshape(num_slots, width)[:, :1]
    depth = jnp.pad(tree.depth, ((0, 0), (1, 0)))
    is_kin = jnp.pad(tree.ancestors, ((0, 0), (1, 0), (0, 0)))
    column = jnp.where(is_kin, (known + tree.depth - 1)[:, None, :], -1)
    row = jnp.arange(num_slots * width, dtype=jnp.int32)[:, None]
    token = jnp.broadcast_to(drafts.tokens[:, None, :], is_kin.shape)
    at = row, column.reshape(-1, num)
    return answer._replace(
        tokens=arrays.put(answer.tokens, at, token.reshape(-1, num)),
        num_tokens=(known + depth).reshape(-1),
    )


def _walk(
    child: Int32[Array, "slots places width"],
    accepts: Bool[Array, "slots places width"],
    drafts: Drafts,
    tree: Tree | None,
) -> tuple[Int32[Array, " slots"], Int32[Array, "slots drafts"]]:
    """Goes from each root to the first accepted child, and on, while there is one.

    Returns:
      How many drafts are accepted, and their places in order.
    """
    place = jnp.arange(1, drafts.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    accepts &= child >= 0
    if tree is None or drafts.parents is None:
        run = jnp.cumprod(accepts[:, :-1, 0].astype(jnp.int32), axis=1)
        path = jnp.broadcast_to(place, drafts.tokens.shape)
        return jnp.sum(run, axis=1, dtype=jnp.int32), path
    first = jnp.argmax(accepts, axis=2)[:, :, None]
    taken = jnp.take_along_axis(jnp.where(accepts, child, -1), first, axis=2)[:, :, 0]
    is_taken = jnp.take_along_axis(taken, drafts.parents, axis=1) == place
    reached = jnp.all(~tree.ancestors | is_taken[:, None, :], axis=2)
    at_depth = reached[:, None, :] & (tree.depth[:, None, :] == place[:, :, None])
    path = jnp.max(jnp.where(at_depth, place[:, None, :], 0), axis=2)
    return jnp.sum(reached, axis=1, dtype=jnp.int32), path


def _flip(
    accept: Float[Array, "rows width"],
    params: Params,
    positions: Int32[Array, " rows"],
) -> Bool[Array, "rows width"]:
    """Accepts each child with its probability."""

    def flip() -> Array:
        key = random_keys.draw_key(
            params.key, params.sample, positions, random_keys.ACCEPT
        )
        rank = jnp.arange(accept.shape[1], dtype=jnp.int32)[None, :]
        return random_keys.uniform(key, rank, accept.dtype) < accept

    unsure = jnp.any((accept > 0) & (accept < 1))
    return lax.cond(unsure, flip, lambda: accept > 0)


def _logprobs(rows: _Rows, tokens: Int32[Array, " rows"]) -> Float[Array, " rows"]:
    """Log-probabilities of a token of each row where they are asked for; else 0."""
    dtype = top_k.wide(rows.logits[:, 0]).dtype
    nothing = jnp.zeros(tokens.shape, dtype)
    found = lax.cond(
        jnp.any(rows.scored),
        lambda: sampler.token_logprobs(rows.logits, tokens),
        lambda: nothing,
    )
    return jnp.where(rows.scored, found, nothing)


def _note(
    state: EngineState, drawn: _Drawn, emits: Bool[Array, " slots"]
) -> tuple[EngineState, Emitted]:
    """Appends the tokens up to an end, and says who has ended, and why."""
    s, sequence = state.sequences, state.slots.sequence
    row = jnp.maximum(sequence, 0)
    known, width = s.num_tokens[row], drawn.tokens.shape[0] // row.shape[0]
    place, owner = _places(known, width), _by_place(row, width)
    stops = jnp.any(drawn.tokens[:, None] == s.stop_tokens[owner], axis=1)
    if drawn.num is None:
        counts = emits & ~drawn.invalid
        num = counts.astype(jnp.int32)
        full = known + num == s.limit[row]
        why = jnp.where(stops, STOPPED, jnp.where(full, FULL, NOT_ENDED))
        why = jnp.where(drawn.invalid, NOT_A_NUMBER, why)
        reason = jnp.where(emits, why, NOT_ENDED)
    else:
        full = place + 1 == s.limit[owner]
        why = jnp.where(stops, STOPPED, jnp.where(full, FULL, NOT_ENDED))
        num, reason = _up_to_an_end(jnp.where(emits, drawn.num, 0), why)
        broken = emits & drawn.invalid & (reason == NOT_ENDED)
        reason = jnp.where(broken, NOT_A_NUMBER, reason)
        counts = place < _by_place(known + num, width)
    at = (_by_place(sequence, width), jnp.where(counts, place, NOBODY))
    slot = arrays.namers(sequence, s.num_tokens.shape[0])
    num_tokens = arrays.take(known + num, slot, fill=0)
    s = s._replace(
        tokens=arrays.put(s.tokens, at, drawn.tokens),
        num_tokens=jnp.where(slot >= 0, num_tokens, s.num_tokens),
    )
    begins = (num > 0) & (known == s.prompt_length[row])
    state = state._replace(sequences=s)
    state = groups.note_ends(state, begins, reason != NOT_ENDED, reason)
    tokens, logprobs = (x.reshape(-1, width) for x in (drawn.tokens, drawn.logprobs))
    return state, Emitted(tokens, logprobs, num, reason, drawn.verified)


def _by_place(of_slots: Array, width: int) -> Array:
    """What each slot has, for each of its places."""
    return of_slots if width == 1 else jnp.repeat(of_slots, width)


def _places(known: Int32[Array, " slots"], width: int) -> Int32[Array, " rows"]:
    """Where the tokens behind the known ones will stand, those of a slot in order."""
    if width == 1:
        return known
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    return (known[:, None] + index).reshape(-1)


def _up_to_an_end(
    num: Int32[Array, " slots"], why: Int32[Array, " rows"]
) -> tuple[Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Of `num` tokens of each slot those up to the first that ends it, and why.

    `why` says of each token how it would end its sequence, or NOT_ENDED.
    """
    why = why.reshape(num.shape[0], -1)
    index = jnp.arange(why.shape[1], dtype=jnp.int32)[None, :]
    ends = (why != NOT_ENDED) & (index < num[:, None])
    end = jnp.min(jnp.where(ends, index, index.size), axis=1)
    first = ends & (index == end[:, None])
    reason = jnp.max(jnp.where(first, why, NOT_ENDED), axis=1)
    return jnp.minimum(num, end + 1), reason


def _score(
    state: EngineState,
    rows: _Rows,
    result: model_runner.Fed,
    emitted: Emitted,
    known: Int32[Array, " slots"],
    config: EngineConfig,
) -> EngineState:
    """Keeps log-probabilities: of what was drawn, of alternatives, and of prompts."""
    s, width = state.sequences, config.emit_width
    sequence, place = _by_place(state.slots.sequence, width), _places(known, width)
    counts = place < _by_place(known + emitted.num_emitted, width)
    place = jnp.where(counts, place, NOBODY)
    drawn = emitted.logprobs.reshape(-1).astype(jnp.float32)
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
    logits = result.logits[config.max_slots : config.num_logit_rows]
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
    at: tuple[Int32[Array, " rows"], Int32[Array, " rows"]],
    config: EngineConfig,
) -> Sequences:
    """Keeps the most likely tokens where they are asked for."""
    if not config.max_logprobs:
        return s
    logits, shape = rows.logits, (rows.logits.shape[0], config.max_logprobs)
    ids, values = lax.cond(
        jnp.any(rows.scored),
        lambda: sampler.top_logprobs(logits, config.max_logprobs),
        lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits.dtype)),
    )
    return s._replace(
        top_ids=arrays.put(s.top_ids, at, ids),
        top_logprobs=arrays.put(s.top_logprobs, at, values.astype(jnp.float32)),
    )
