"""Prompt lookup: drafts the tokens that followed an earlier match in the same text.

The last tokens of a sequence are searched earlier in it; the tokens after the match are
the draft. It needs no model, and pays where answers repeat their context: code,
summaries, edits.

Source: Saxena 2023, "Prompt Lookup Decoding" (longest suffix first); Yang et al. 2023,
arXiv:2304.04487 (copying from a reference).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

from jaxkv import arrays, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import Drafter, DrafterMemory, Drafts, EngineConfig, EngineState
from jaxkv.memory import Pages


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """Drafts the tokens after the latest of the longest matches of the last tokens."""

    shortest: int = 3
    """Shortest match in tokens, at least 1: shorter matches of bytes cost more in
    rejected rows than they gain."""
    longest: int = 4
    """Longest match in tokens, at least `shortest`."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a field is out of its range; the message shows it.
        """
        validation.check_fields(self)
        validation.integer("longest", self.longest, low=self.shortest)

    def propose(
        self,
        params: PyTree[ArrayOrShape],
        memory: DrafterMemory,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[DrafterMemory, Pages, Drafts]:
        """Looks up the last tokens of every slot in its own sequence."""

        def look_up() -> Drafts:
            row = jnp.maximum(state.slots.sequence, 0)
            num_tokens = jnp.where(granted > 0, state.slots.num_tokens, 0)
            return look_up_drafts(
                state.sequences.tokens[row],
                num_tokens,
                shortest=self.shortest,
                longest=self.longest,
                num=config.max_drafts,
            )

        shapes = jax.eval_shape(look_up)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        drafts = lax.cond(jnp.any(granted > 0), look_up, lambda: blank)
        return memory, state.pages, drafts


def look_up_drafts(
    tokens: Int32[Array, "slots max_length"],
    num_tokens: Int32[Array, " slots"],
    *,
    shortest: int,
    longest: int,
    num: int,
) -> Drafts:
    """Returns the tokens after the latest longest match of the last tokens.

    All sizes are static.

    Args:
      tokens: tokens of each slot, undefined from `num_tokens` on.
      num_tokens: number of known tokens; 0 drafts none.
      shortest: shortest match in tokens.
      longest: longest match in tokens.
      num: drafts of each slot. At the end of the text they continue at the match again.

    Returns:
      `num` drafts, or none where there is no match.
    """
    max_length = tokens.shape[1]
    end = jnp.arange(max_length, dtype=jnp.int32)[None, :]
    is_inside = end < num_tokens[:, None] - 1
    matches = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(longest):
        last = arrays.take(
            tokens,
            (jnp.arange(num_tokens.shape[0], dtype=jnp.int32), num_tokens - 1 - back),
            fill=-1,
        )
        before = jnp.roll(tokens, back, axis=1)
        extends = (before == last[:, None]) & (end >= back) & (matches == back)
        matches += (extends & is_inside).astype(jnp.int32)
    # The longest match; ties go to the latest.
    best = jnp.max(matches * max_length + end, axis=1)
    length = best // max_length
    start = best % max_length + 1
    is_match = (length >= shortest) & (num_tokens > 0)
    period = jnp.maximum(num_tokens - start, 1)
    index = jnp.arange(num, dtype=jnp.int32)[None, :] % period[:, None]
    place = jnp.where(is_match[:, None], start[:, None] + index, -1)
    slot = jnp.arange(num_tokens.shape[0], dtype=jnp.int32)[:, None]
    return Drafts(
        num=jnp.where(is_match, num, 0),
        tokens=arrays.take(tokens, (slot, place), fill=0),
    )
