"""Jacobi decoding: the model iterates on its own guesses, several tokens at a time.

The next tokens solve a system of equations: token i is the model's output for the
tokens before it. Each step evaluates all equations at the last guesses, and the outputs
become the next guesses. A guess whose predecessors are right becomes right, so every
step fixes at least one token, and m tokens take at most m steps; the fixed point is the
output of plain decoding. Sampled tokens have fixed keys, so the same holds for them.

Source: Santilli et al. 2023, arXiv:2305.10427, algorithm 1 and proposition 1; Song et
al. 2021, arXiv:2002.03629.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, PyTree

from jaxkv import arrays
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import Drafter, Drafts, EngineConfig, EngineState, VerifyOutput
from jaxkv.memory import Pages


class JacobiState(NamedTuple):
    """State of `Jacobi`, one row per sequence."""

    tokens: Int32[Array, "sequences drafts"]
    """Guesses of the tokens after the known ones."""


@dataclasses.dataclass(frozen=True)
class Jacobi(Drafter):
    """Drafts the model's last outputs at the positions after the known tokens."""

    @property
    def reuses_draws(self) -> bool:
        """True: the guesses are the verifier's samples."""
        return True

    def init(self, config: EngineConfig) -> JacobiState:
        """Returns guesses of token 0."""
        shape = config.max_sequences, config.max_drafts
        return JacobiState(jnp.zeros(shape, jnp.int32))

    def propose(
        self,
        params: PyTree[ArrayOrShape],
        memory: JacobiState,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[JacobiState, Pages, Drafts]:
        """Proposes the current guesses."""
        tokens = arrays.take(memory.tokens, state.slots.sequence, fill=0)
        return memory, state.pages, Drafts(granted, tokens)

    def learn(
        self, memory: JacobiState, state: EngineState, verified: VerifyOutput
    ) -> JacobiState:
        """Stores the model's outputs after the last accepted place.

        Places beyond those evaluated repeat the last output.
        """
        v = verified
        width = memory.tokens.shape[1]
        index = jnp.arange(width, dtype=jnp.int32)[None, :]
        place = jnp.minimum(v.accepted[:, None] + 1 + index, v.num_drafts[:, None])
        guesses = jnp.take_along_axis(v.follows, place, axis=1)
        row = jnp.where(v.emits, state.slots.sequence, arrays.NONE)
        return JacobiState(arrays.put(memory.tokens, row, guesses))
