"""Consistency: of a wrong guess a model shall say what it says of the right one.

Jacobi decoding guesses a block of tokens and takes what the model says behind each as
the next guesses, until nothing changes any more. A model that was trained on text says
little that is right behind wrong tokens, so a block of n takes nearly n iterations. One
that says behind every guess on the way what it says behind the block as it ends jumps
there in fewer. Losses of text beside keep what the model knows.

Trajectories are laid out as a stream of records, each the text before a block, the
block as it ends, a guess on the way there, and other text; `train` reads them as
windows.

Source: Kou et al. 2024, arXiv:2403.00835 (consistency large language models), equation
2, the global loss, and equation 4, with the text that the model was trained on in place
of its answers: so it keeps its law, which a model of chats is not asked for.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxkv import validation
from jaxkv.models import Params
from scaling.costs.parallelism import Layout
from scaling.training import architectures, objectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Consistency(objectives.Objective):
    """An objective of training: pass it to `train` with records as its stream."""

    prompt_tokens: int = 64
    """Of text before each block."""
    block_tokens: int = 32
    """Of each block."""
    text_tokens: int = 256
    """Of the text that is learnt beside, at least 2."""
    text_weight: float = 4.0
    """Of the loss of text, beside that of consistency: the less, the more is gained in
    decoding and lost of the text."""

    def __post_init__(self) -> None:
        """Refuses records that hold nothing to learn."""
        validation.at_least(self, "prompt_tokens", "block_tokens")
        validation.at_least(self, "text_tokens", low=2)
        validation.at_least(self, "text_weight", low=0)

    @property
    def of_records(self) -> bool:
        """Records are not to be cut."""
        return True

    @property
    def record_tokens(self) -> int:
        """Tokens of a record, which `seq_len` must be."""
        return self.prompt_tokens + 2 * self.block_tokens + self.text_tokens

    def check(self, seq_len: int, layout: Layout) -> None:
        """Refuses windows that are no records, and more than one device."""
        if seq_len != self.record_tokens:
            raise ValueError(f"{seq_len=} must be record_tokens={self.record_tokens}")
        if layout.num_devices > 1:
            raise ValueError(f"{layout=} must be one device, to train consistency")

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "batch record"],
        targets: Int[Array, "batch record"],
        *,
        model: architectures.Architecture,
        layout: Layout = architectures.ONE,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The loss, and what of it is consistency, in nats per token of a block.

        The latter is how far what the model says behind guesses is from what it says
        behind the block as it ends (Kullback-Leibler). The gradient goes through the
        former alone.
        """
        del targets, layout
        sizes = np.array([self.prompt_tokens, self.block_tokens, self.block_tokens])
        parts = jnp.split(tokens, np.cumsum(sizes), axis=1)
        prompts, ends, guesses, texts = parts

        def read(blocks: Array) -> architectures.ForwardOutput:
            both = jnp.concatenate([prompts, blocks], axis=1)
            return architectures.forward(params, both, config=model)

        first = self.prompt_tokens - 1
        found, wanted = read(guesses), lax.stop_gradient(read(ends).logits)
        far = divergence(wanted[:, first:-1], found.logits[:, first:-1]).mean()
        text, _ = objectives.mean_loss(params, texts, model=model)
        return far + self.text_weight * text + found.auxiliary, far


def divergence(
    wanted: Float[Array, "*rows vocab"], found: Float[Array, "*rows vocab"]
) -> Float[Array, "*rows"]:
    """Nats by which what was found is worse than what is wanted, of logits of both."""
    law = jax.nn.log_softmax(wanted)
    return jnp.sum(jnp.exp(law) * (law - jax.nn.log_softmax(found)), axis=-1)


class Trajectory(NamedTuple):
    """How a block was found.

    Attributes:
      prompt: before the block.
      guesses: of every iteration, the last ones the block.
    """

    prompt: Sequence[int]
    guesses: Int[np.ndarray, "iterations tokens"]


def make_records(
    found: Sequence[Trajectory],
    text: UInt[np.ndarray, " text"],
    *,
    each: int,
    text_tokens: int,
    seed: int,
) -> UInt[np.ndarray, " tokens"]:
    """Lays trajectories out as a stream of records, shuffled.

    Args:
      found: with prompts and blocks of as many tokens as `Consistency` says.
      text: what is learnt beside, cut at places that are drawn; more than a record's.
      each: guesses of a trajectory that are taken, drawn without replacement from those
        before its block was found; all, where they are fewer.
      text_tokens: as `Consistency` has it.
      seed: of the draws, and the order.

    Raises:
      ValueError: every block was found at once.
    """
    rng, made = np.random.default_rng(seed), []
    for prompt, guesses in found:
        on_the_way = np.flatnonzero((guesses != guesses[-1]).any(axis=1))
        for place in rng.permutation(on_the_way)[:each]:
            start = rng.integers(len(text) - text_tokens)
            beside = text[start : start + text_tokens]
            made.append(np.concatenate([prompt, guesses[-1], guesses[place], beside]))
    if not made:
        raise ValueError("no trajectory has a guess that is not its block already")
    made = [made[i] for i in rng.permutation(len(made))]
    return np.concatenate(made).astype("uint16")
