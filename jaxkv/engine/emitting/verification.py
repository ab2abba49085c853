"""Verification of drafts: the verifier judges them, and one path is accepted.

All places of a slot are judged at once, each as if all tokens before it were known.
There is a program for each draft length of `EngineConfig.draft_buckets`, and one for
length 0, so that a step with short drafts judges few places.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, sampling
from jaxkv.engine import drafting, model_runner
from jaxkv.engine.drafting import AcceptResult, Drafts, Speculation, Tree, VerifyOutput
from jaxkv.engine.emitting import logit_rows
from jaxkv.engine.emitting.logit_rows import LogitsFn, TokenHistory
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.sampling import ACCEPT, Params, draw_key


class Continuation(NamedTuple):
    """Tokens that follow the known tokens of each slot."""

    tokens: Int32[Array, "slots places"]
    """Accepted drafts, then the token sampled after them."""
    num: Int32[Array, " slots"]
    """Number of these tokens; arbitrary in slots that do not emit."""
    invalid: Bool[Array, " slots"]
    """Slots without a valid token after the accepted drafts."""
    verified: VerifyOutput


def verify(
    state: EngineState,
    result: model_runner.ModelOutput,
    emits: Bool[Array, " slots"],
    drafts: Drafts,
    speculation: Speculation,
    logits_fn: LogitsFn | None,
    config: EngineConfig,
) -> Continuation:
    """Judges the drafts of each slot, and samples the token after the accepted ones.

    The arguments are those of `sampling_step.emit`; `emits` marks slots that emit.
    """

    def judge(length: int) -> Continuation:
        draft_probs = drafts.draft_probs
        parents = drafts.parents
        tree = drafts.tree
        if tree is not None:
            ancestors = tree.ancestors[:, :length, :length]
            tree = Tree(tree.depth[:, :length], ancestors) if length else None
        few = Drafts(
            num=drafts.num,
            tokens=drafts.tokens[:, :length],
            draft_probs=None if draft_probs is None else draft_probs[:, : 1 + length],
            parents=None if parents is None or not length else parents[:, :length],
            tree=tree,
            grammar_state=None
            if drafts.grammar_state is None
            else drafts.grammar_state[:, : 1 + length],
        )
        judged = _judge(state, result, emits, few, speculation, logits_fn, config)
        path = jnp.pad(judged.verified.path, ((0, 0), (0, config.max_drafts - length)))
        return judged._replace(
            tokens=_wide(judged.tokens, config),
            verified=judged.verified._replace(
                path=path, follows=_wide(judged.verified.follows, config)
            ),
        )

    lengths = 0, *config.draft_buckets
    programs = [functools.partial(judge, length) for length in lengths]
    blank = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(programs[0])
    )
    max_drafts = jnp.max(jnp.where(emits, drafts.num, -1))
    index = sum((max_drafts > length).astype(jnp.int32) for length in lengths[:-1])
    index = jnp.where(jnp.any(emits), 1 + index, 0)
    with jax.named_scope("verify"):
        return lax.switch(index, [lambda: blank, *programs])


def _wide(x: Int32[Array, "slots places"], config: EngineConfig) -> Array:
    return jnp.pad(x, ((0, 0), (0, config.emit_width - x.shape[1])))


def _judge(
    state: EngineState,
    result: model_runner.ModelOutput,
    emits: Bool[Array, " slots"],
    drafts: Drafts,
    speculation: Speculation,
    logits_fn: LogitsFn | None,
    config: EngineConfig,
) -> Continuation:
    """Judges `1 + length` places of each slot, where `drafts` has `length` columns."""
    num_slots, length = drafts.tokens.shape
    logits = place_logits(result, length, config)
    rows = logit_rows.gather_logit_rows(state, logits, emits, 1 + length)
    answer = rows.answer
    if drafts.tree is not None:
        answer = known_tokens_by_branch(answer, drafts)
    if drafts.grammar_state is not None:
        answer = answer._replace(grammar_state=drafts.grammar_state.reshape(-1))
    slot = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    child = drafting.find_children(drafts, speculation.drafter.width)
    # By place; the root is not a draft.
    branch_tokens = jnp.pad(drafts.tokens, ((0, 0), (1, 0)), constant_values=-1)
    token = arrays.take(branch_tokens, (slot[:, :, None], child), fill=-1)
    token = token.reshape(-1, child.shape[2])
    draft_probs = drafts.draft_probs
    draft_probs = (
        None if draft_probs is None else draft_probs.reshape(token.shape[0], -1)
    )

    def of_rows(
        answer: TokenHistory,
        raw: Array,
        params: Params,
        children: Array,
        draft_probs: Array | None,
    ) -> tuple[AcceptResult, Array]:
        num_tokens = answer.num_tokens
        logits = logit_rows.apply_logits_fn(logits_fn, answer, raw)
        logits = sampling.penalise(
            logits, answer.tokens, answer.prompt_length, num_tokens, params
        )
        ruling = speculation.verifier(
            logits, children, draft_probs, params, num_tokens, raw
        )
        accept = ruling.accept
        if answer.grammar_state is not None:
            # Also under verifiers that accept drafts of probability 0.
            row = jnp.arange(children.shape[0], dtype=jnp.int32)[:, None]
            at = jnp.broadcast_to(row, children.shape), children
            is_forbidden = arrays.take(logits, at, fill=0) == -jnp.inf
            accept = jnp.where(is_forbidden, 0, accept)

        def flip() -> Array:
            """Accepts each child with its probability."""
            keys = params.key, params.sample, num_tokens
            key = draw_key(*keys, ACCEPT)
            rank = jnp.arange(accept.shape[1], dtype=jnp.int32)[None, :]
            return sampling.uniform(key, rank, accept.dtype) < accept

        unsure = jnp.any((accept > 0) & (accept < 1))
        return ruling, lax.cond(unsure, flip, lambda: accept > 0)

    judged = answer, logits, rows.params, token, draft_probs
    ruling, accepts = logit_rows.map_rows(of_rows, judged, config)
    accepted, path = accept_path(child, accepts.reshape(child.shape), drafts)
    return _follow_path(path, accepted, ruling, branch_tokens, drafts, emits)


def _follow_path(
    path: Int32[Array, "slots drafts"],
    accepted: Int32[Array, " slots"],
    ruling: AcceptResult,
    tree_tokens: Int32[Array, "slots places"],
    drafts: Drafts,
    emits: Bool[Array, " slots"],
) -> Continuation:
    """Returns the drafts along a path, and the token that follows the last of them.

    `tree_tokens` are the drafts by place.
    """
    slot = jnp.arange(tree_tokens.shape[0], dtype=jnp.int32)[:, None]
    follows, invalid = (
        x.reshape(tree_tokens.shape) for x in (ruling.token, ruling.invalid)
    )
    # The place before each token; arbitrary after the last accepted draft.
    place = jnp.pad(path, ((0, 0), (1, 0)))
    index = jnp.arange(tree_tokens.shape[1], dtype=jnp.int32)[None, :]
    last = index == accepted[:, None]
    tokens = jnp.pad(arrays.take(tree_tokens, (slot, path), fill=0), ((0, 0), (0, 1)))
    tokens = jnp.maximum(tokens, 0)
    tokens = jnp.where(last, jnp.take_along_axis(follows, place, axis=1), tokens)
    ends = last & jnp.take_along_axis(invalid, place, axis=1)
    invalid = jnp.any(ends, axis=1)
    return Continuation(
        tokens=tokens,
        num=accepted + (~invalid).astype(jnp.int32),
        invalid=invalid,
        verified=VerifyOutput(drafts.num, accepted, path, follows, emits),
    )


def place_logits(
    result: model_runner.ModelOutput, length: int, config: EngineConfig
) -> Float[Array, "rows vocab"]:
    """Returns the logits of `1 + length` places of each slot, in order of slots."""
    assert result.drafted is not None
    last = result.logits[: config.max_slots, None]
    logits = jnp.concatenate([last, result.drafted[:, :length]], axis=1)
    return logits.reshape(-1, logits.shape[2])


def token_logits(
    result: model_runner.ModelOutput,
    path: Int32[Array, "slots drafts"] | None,
    config: EngineConfig,
) -> Float[Array, "rows vocab"]:
    """Returns the logits of each token of a step; `path` None means a chain."""
    logits = place_logits(result, config.max_drafts, config)
    if path is None:
        return logits
    first = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None] * config.emit_width
    return logits[(first + jnp.pad(path, ((0, 0), (1, 0)))).reshape(-1)]


def known_tokens_by_branch(answer: TokenHistory, drafts: Drafts) -> TokenHistory:
    """Sets the known tokens of each place in a tree to those on its path."""
    tree = drafts.tree
    assert tree is not None
    num_slots, num = drafts.tokens.shape
    width = num + 1
    num_tokens = answer.num_tokens.reshape(num_slots, width)[:, :1]
    depth = jnp.pad(tree.depth, ((0, 0), (1, 0)))
    is_kin = jnp.pad(tree.ancestors, ((0, 0), (1, 0), (0, 0)))
    column = jnp.where(is_kin, (num_tokens + tree.depth - 1)[:, None, :], -1)
    row = jnp.arange(num_slots * width, dtype=jnp.int32)[:, None]
    token = jnp.broadcast_to(drafts.tokens[:, None, :], is_kin.shape)
    at = row, column.reshape(-1, num)
    return answer._replace(
        tokens=arrays.put(answer.tokens, at, token.reshape(-1, num)),
        num_tokens=(num_tokens + depth).reshape(-1),
    )


def accept_path(
    child: Int32[Array, "slots places width"],
    accepts: Bool[Array, "slots places width"],
    drafts: Drafts,
) -> tuple[Int32[Array, " slots"], Int32[Array, "slots drafts"]]:
    """Follows the first accepted child of each place, from the root on.

    Returns:
      The number of accepted drafts of each slot, and their places in order.
    """
    place = jnp.arange(1, drafts.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    accepts &= child >= 0
    tree = drafts.tree
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
