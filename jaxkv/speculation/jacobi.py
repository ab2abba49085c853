"""Jacobi decoding: the model corrects its own guesses, several tokens at a time.

The next tokens solve a system of equations, token i being what the model says of those
before it. Each step evaluates all equations at the last guesses, and takes what comes
out as the next ones. A guess whose predecessors are right comes out right, so every
step fixes one token at least and m tokens take at most m steps: the fixed point is
plain decoding. Sampled tokens have fixed keys, so that they are a fixed point, too.

Source: Santilli et al. 2023, arXiv:2305.10427, algorithm 1 and proposition 1; Song et
al. 2021, arXiv:2002.03629.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv import arrays
from jaxkv.engine.drafting import Drafter, Drafts, Verified
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages


class JacobiState(NamedTuple):
    """What is remembered of the sequences."""

    tokens: Int32[Array, "sequences drafts"]
    """Guesses of the tokens that follow the known ones."""


@dataclasses.dataclass(frozen=True)
class Jacobi(Drafter):
    """Drafts what the model said last of the places beyond the known tokens."""

    @property
    def reuses_draws(self) -> bool:
        """True: the guesses are the verifier's draws."""
        return True

    def init(self, config: EngineConfig) -> JacobiState:
        """Guesses token 0 everywhere."""
        shape = config.max_sequences, config.max_drafts
        return JacobiState(jnp.zeros(shape, jnp.int32))

    def propose(
        self,
        params: Any,
        memory: JacobiState,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[JacobiState, Pages, Drafts]:
        """Proposes the guesses as they are."""
        tokens = arrays.take(memory.tokens, state.slots.sequence, fill=0)
        return memory, state.pages, Drafts(granted, tokens)

    def learn(
        self, memory: JacobiState, state: EngineState, verified: Verified
    ) -> JacobiState:
        """Takes what the model said behind the last accepted place.

        Where no equation was evaluated the last token said is guessed again.
        """
        v, width = verified, memory.tokens.shape[1]
        index = jnp.arange(width, dtype=jnp.int32)[None, :]
        place = jnp.minimum(v.accepted[:, None] + 1 + index, v.num_drafts[:, None])
        guesses = jnp.take_along_axis(v.follows, place, axis=1)
        row = jnp.where(v.emits, state.slots.sequence, arrays.NONE)
        return JacobiState(arrays.put(memory.tokens, row, guesses))
