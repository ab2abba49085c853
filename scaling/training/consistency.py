"""Consistency training for Jacobi decoding.

Jacobi decoding guesses a block of tokens and replaces all guesses by the model's
predictions after each of them, until the block is a fixed point. A model that was
trained on text predicts poorly after wrong tokens, so a block of n takes nearly n
iterations. A model whose predictions after every intermediate guess equal those after
the final block reaches it in fewer. A loss on text preserves the model's knowledge.

Trajectories become a stream of records, each with the text before a block, the final
block, an intermediate guess, and further text; `train` reads them as windows.

Source: Kou et al. 2024, arXiv:2403.00835 (consistency large language models), equation
2, the global loss, and equation 4, with the model's training text in place of its
answers, which preserves its distribution.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxkv import validation
from jaxkv.models import Params
from jaxkv.validation import ConfigRecord, NonNegativeFloat, PositiveInt, Range
from scaling.costs import Layout
from scaling.training import architectures, objectives


class Consistency(objectives.TrainingObjective, ConfigRecord):
    """Training objective of consistency, for `train` with a stream of records."""

    prompt_tokens: PositiveInt = 64
    """Tokens of text before each block."""
    block_tokens: PositiveInt = 32
    """Tokens of each block."""
    text_tokens: Annotated[int, Range(2)] = 256
    """Tokens of the further text, at least 2."""
    text_weight: NonNegativeFloat = 4.0
    """Weight of the loss of text relative to that of consistency: a smaller weight
    makes decoding faster and predictions of text worse."""

    @property
    def of_records(self) -> bool:
        """True: windows are whole records."""
        return True

    @property
    def record_tokens(self) -> int:
        """Tokens of a record, the required `seq_len`."""
        return self.prompt_tokens + 2 * self.block_tokens + self.text_tokens

    def check(self, seq_len: int, layout: Layout) -> None:
        """Checks that windows are records, on one device."""
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
        """Returns the loss, and its consistency part, in nats per token of a block.

        The consistency part is the Kullback-Leibler divergence of predictions after
        guesses from those after the final block. The gradient is that of the whole
        loss.
        """
        del targets, layout
        sizes = np.array([self.prompt_tokens, self.block_tokens, self.block_tokens])
        parts = jnp.split(tokens, np.cumsum(sizes), axis=1)
        prompts, ends, guesses, texts = parts

        def read(blocks: Array) -> architectures.ForwardOutput:
            both = jnp.concatenate([prompts, blocks], axis=1)
            return architectures.forward(params, both, config=model)

        first = self.prompt_tokens - 1
        predictions = read(guesses)
        wanted = lax.stop_gradient(read(ends).logits)
        far = divergence(wanted[:, first:-1], predictions.logits[:, first:-1]).mean()
        text, _ = objectives.mean_loss(params, texts, model=model)
        return far + self.text_weight * text + predictions.auxiliary, far


def divergence(
    wanted: Float[Array, "*rows vocab"], guess: Float[Array, "*rows vocab"]
) -> Float[Array, "*rows"]:
    """Returns the Kullback-Leibler divergence of `guess` from `wanted`, both logits."""
    law = jax.nn.log_softmax(wanted)
    return jnp.sum(jnp.exp(law) * (law - jax.nn.log_softmax(guess)), axis=-1)


class Trajectory(NamedTuple):
    """The iterations in which a block was decoded.

    Attributes:
      prompt: tokens before the block.
      guesses: guesses of every iteration; the last is the final block.
    """

    prompt: Sequence[int]
    guesses: Int[np.ndarray, "iterations tokens"]


@validation.checks_numbers(text_tokens=0, seed=validation.SEEDS)
def make_records(
    trajectories: Sequence[Trajectory],
    text: UInt[np.ndarray, " text"],
    *,
    num_guesses: int,
    text_tokens: int,
    seed: int,
) -> UInt[np.ndarray, " tokens"]:
    """Turns trajectories into a stream of records, shuffled.

    Args:
      trajectories: trajectories with the prompt and block lengths of `Consistency`.
      text: further text, longer than that of a record, cut at random positions.
      num_guesses: number of guesses of a trajectory, drawn without replacement from
        those before the final block; all if there are fewer.
      text_tokens: as in `Consistency`.
      seed: seed of the draws and of the order.

    Raises:
      ValueError: every block was found in one iteration.
    """
    rng = np.random.default_rng(seed)
    records = []
    for prompt, guesses in trajectories:
        on_the_way = np.flatnonzero((guesses != guesses[-1]).any(axis=1))
        for place in rng.permutation(on_the_way)[:num_guesses]:
            start = rng.integers(len(text) - text_tokens)
            extra = text[start : start + text_tokens]
            records.append(np.concatenate([prompt, guesses[-1], guesses[place], extra]))
    if not records:
        raise ValueError("no trajectory has a guess that differs from its block")
    records = [records[i] for i in rng.permutation(len(records))]
    return np.concatenate(records).astype("uint16")
