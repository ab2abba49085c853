"""Grammars of requests in a step: forbidden tokens, and states after emitted ones.

Grammars change logits as a `logits_fn` does, after the user's one. The state of an
answer is in `Sequences`, so it is kept by preemption, forks and snapshots.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv import arrays
from jaxkv.engine.drafting import Drafts
from jaxkv.engine.emitting.logit_rows import LogitsFn, TokenHistory, apply_logits_fn
from jaxkv.engine.emitting.sampling_step import SamplerOutput
from jaxkv.engine.state import EngineState
from jaxkv.sampling import GrammarTables, mask_forbidden, next_grammar_state


def constrain_logits(
    logits_fn: LogitsFn | None, grammars: GrammarTables | None
) -> LogitsFn | None:
    """Returns a `logits_fn` that also forbids tokens; without grammars the given one.

    Args:
      logits_fn: the user's function, applied first.
      grammars: grammars of the requests.
    """
    if grammars is None:
        return logits_fn

    def constrain(
        answer: TokenHistory, raw: Float[Array, "rows vocab"]
    ) -> Float[Array, "rows vocab"]:
        logits = apply_logits_fn(logits_fn, answer, raw)
        assert answer.grammar_state is not None
        return mask_forbidden(grammars, answer.grammar_state, logits)

    return constrain


def follow_drafts(
    state: EngineState, drafts: Drafts, grammars: GrammarTables | None
) -> Drafts:
    """Adds the grammar's state at each place, the root and all drafts.

    A place after a forbidden draft has no grammar, since the draft is rejected.
    """
    current = state.sequences.grammar_state
    if grammars is None or current is None:
        return drafts
    places = [arrays.take(current, state.slots.sequence, fill=-1)]
    for i in range(drafts.tokens.shape[1]):
        before = places[-1]
        if drafts.parents is not None:
            stacked = jnp.stack(places, axis=1)
            before = jnp.take_along_axis(stacked, drafts.parents[:, i : i + 1], axis=1)
            before = before[:, 0]
        token = jnp.maximum(drafts.tokens[:, i], 0)
        places.append(next_grammar_state(grammars, before, token))
    return drafts._replace(grammar_state=jnp.stack(places, axis=1))


@jax.named_scope("advance_grammars")
def advance_grammars(
    state: EngineState, emitted: SamplerOutput, grammars: GrammarTables | None
) -> EngineState:
    """Moves the grammars of the slots past the emitted tokens."""
    s = state.sequences
    if grammars is None or s.grammar_state is None:
        return state
    sequence = state.slots.sequence
    current = arrays.take(s.grammar_state, sequence, fill=-1)
    for i in range(emitted.tokens.shape[1]):
        after = next_grammar_state(grammars, current, emitted.tokens[:, i])
        current = jnp.where(i < emitted.num_emitted, after, current)
    after = arrays.put(s.grammar_state, sequence, current)
    return state._replace(sequences=s._replace(grammar_state=after))
