"""Blocks of tokens found by Jacobi iteration, in parallel instead of one by one.

Token i of a block is the model's next token after the text and the block's tokens
before i. An iteration evaluates these equations for all tokens at the current guesses,
which yields the next guesses.

Source: Santilli et al. 2023, arXiv:2305.10427, algorithm 1.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jaxkv import models, sampling
from jaxkv.models import LoadedModel, ModelConfig
from jaxkv.sampling import Params, Sampling, make_params, request_key


class JacobiBlock(NamedTuple):
    """A block and its iterations.

    Attributes:
      guesses: initial guesses and those of each iteration; the last two are equal.
      steps: number of iterations until the guesses stopped changing.
    """

    guesses: Int[np.ndarray, "iterations tokens"]
    steps: int

    @property
    def tokens(self) -> Int[np.ndarray, " tokens"]:
        """Fixed point of the iteration."""
        return self.guesses[-1]

    @property
    def fixed(self) -> Int[np.ndarray, " iterations"]:
        """Length of the correct prefix in each iteration."""
        wrong = self.guesses != self.tokens[None, :]
        ends = np.concatenate([wrong, np.ones((len(wrong), 1), bool)], axis=1)
        return ends.argmax(axis=1)


def sampling_params(asks: list[Sampling]) -> Params:
    """Returns sampling parameters with the same noise as in an engine."""
    keys = [request_key(ask.seed, 0, 0) for ask in asks]
    return make_params(asks, keys, [0] * len(asks))


def find_jacobi_blocks(
    model: LoadedModel,
    texts: list[list[int]],
    asks: list[Sampling],
    num_tokens: int,
    *,
    first: Int[np.ndarray, " texts"] | None = None,
) -> list[JacobiBlock]:
    """Finds the block after each text.

    Args:
      model: the model.
      texts: tokens before the blocks.
      asks: sampling of each block.
      num_tokens: tokens of a block.
      first: token of all initial guesses of each text; None means token 0.
    """
    lengths = np.array([len(text) for text in texts], np.int32)
    # Lengths are rounded up to share a program: a causal model sees no padding.
    width = -(-(int(lengths.max()) + num_tokens) // 64) * 64
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    params = jax.tree.map(jnp.asarray, sampling_params(asks))
    iterates = [np.zeros((len(texts), num_tokens), np.int32)]
    if first is not None:
        iterates[0] += first.astype(np.int32)[:, None]
    # One iteration more than there are tokens confirms the fixed point.
    for _ in range(num_tokens + 1):
        guesses = jnp.asarray(iterates[-1])
        places = jnp.asarray(tokens), jnp.asarray(lengths)
        iterated = _iterate(model.params, *places, guesses, params, config=model.config)
        iterates.append(np.asarray(iterated))
        if (iterates[-1] == iterates[-2]).all():
            break
    return [_block(np.stack(iterates)[:, row]) for row in range(len(texts))]


def _block(guesses: Int[np.ndarray, "iterations tokens"]) -> JacobiBlock:
    """Truncates the iterations after the first that changed no token."""
    same = (guesses[1:] == guesses[:-1]).all(axis=1)
    steps = int(np.argmax(same)) if same.any() else len(guesses) - 1
    return JacobiBlock(guesses[: steps + 2], steps)


@functools.partial(jax.jit, static_argnames="config")
def _iterate(
    params: models.Params,
    tokens: Int32[Array, "texts width"],
    lengths: Int32[Array, " texts"],
    guesses: Int32[Array, "texts tokens"],
    asks: Params,
    config: ModelConfig,
) -> Int32[Array, "texts tokens"]:
    """Evaluates the equations of all tokens at the guesses."""
    (num, size), place = guesses.shape, jnp.arange(guesses.shape[1], dtype=jnp.int32)
    row = jnp.arange(num, dtype=jnp.int32)[:, None]
    at = lengths[:, None] + place[None, :]
    logits = models.logits(params, tokens.at[row, at].set(guesses), config=config)
    row_params = jax.tree.map(lambda x: jnp.repeat(x, size, axis=0), asks)
    unscored: Bool[Array, " rows"] = jnp.zeros((num * size,), bool)
    block_logits = logits[row, at - 1].reshape(num * size, -1)
    samples = sampling.sample(
        block_logits, row_params, at.reshape(-1), keep_logprobs=unscored
    )
    return samples.token.reshape(num, size)
