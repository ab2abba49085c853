"""Prompt lookup: the text itself guesses how it goes on.

The last tokens of a sequence are looked for earlier in it, and what followed them there
is the draft. It costs no model, and pays where answers repeat what stands before them:
code, summaries, edits.

Source: Saxena 2023, "Prompt Lookup Decoding" (longest suffix first); Yang et al. 2023,
arXiv:2304.04487 (copying from a reference).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxkv import arrays, validation
from jaxkv.engine.drafting import Drafter, Drafts
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """Drafts what followed the latest of the longest matches of the last tokens."""

    shortest: int = 3
    """Tokens that must match at least, at least 1: shorter matches of bytes cost more
    in rows that are fed in vain than they gain."""
    longest: int = 4
    """Tokens that are compared at most, at least `shortest`."""

    def __post_init__(self) -> None:
        """Refuses lengths out of range.

        Raises:
          ValueError: says which.
        """
        validation.settle(self)
        validation.integer("longest", self.longest, low=self.shortest)

    def propose(
        self,
        params: Any,
        memory: Any,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[Any, Pages, Drafts]:
        """Looks the last tokens of every slot up in its own."""

        def look() -> Drafts:
            row = jnp.maximum(state.slots.sequence, 0)
            known = jnp.where(granted > 0, state.slots.num_tokens, 0)
            return lookup(
                state.sequences.tokens[row],
                known,
                shortest=self.shortest,
                longest=self.longest,
                num=config.max_drafts,
            )

        shapes = jax.eval_shape(look)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        drafts = lax.cond(jnp.any(granted > 0), look, lambda: blank)
        return memory, state.pages, drafts


def lookup(
    tokens: Int32[Array, "slots max_length"],
    known: Int32[Array, " slots"],
    *,
    shortest: int,
    longest: int,
    num: int,
) -> Drafts:
    """Finds how the last tokens went on before; all sizes are static.

    Args:
      tokens: of each slot, meaningless from `known` on.
      known: how many are known; 0 looks for nothing.
      shortest: tokens that must match at least.
      longest: tokens that are compared at most.
      num: drafts of each slot. Where the text ends before, it is taken to go round.

    Returns:
      The drafts: `num` of them, or none where nothing matches.
    """
    max_length = tokens.shape[1]
    end = jnp.arange(max_length, dtype=jnp.int32)[None, :]
    there = end < known[:, None] - 1
    matches = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(longest):
        last = arrays.take(
            tokens,
            (jnp.arange(known.shape[0], dtype=jnp.int32), known - 1 - back),
            fill=-1,
        )
        before = jnp.roll(tokens, back, axis=1)
        alike = (before == last[:, None]) & (end >= back) & (matches == back)
        matches += (alike & there).astype(jnp.int32)
    # The longest match first, of equal ones the latest.
    best = jnp.max(matches * max_length + end, axis=1)
    length, start = best // max_length, best % max_length + 1
    found = (length >= shortest) & (known > 0)
    period = jnp.maximum(known - start, 1)
    index = jnp.arange(num, dtype=jnp.int32)[None, :] % period[:, None]
    place = jnp.where(found[:, None], start[:, None] + index, -1)
    slot = jnp.arange(known.shape[0], dtype=jnp.int32)[:, None]
    return Drafts(
        num=jnp.where(found, num, 0), tokens=arrays.take(tokens, (slot, place), fill=0)
    )
