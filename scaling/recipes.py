"""The recipe of a training run: everything that decides its result, optimizer included.

Plain values; `training` carries them out.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from scaling import architectures, corpora


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates; the learning rate is apart, in `Schedule`."""

    kind: Literal["muon", "adamw", "sgd"] = "muon"
    """`muon`: Muon for the layers' matrices, AdamW for everything else; `sgd`: with
    momentum, not dampened."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean square gradient."""
    momentum: float = 0.95
    """Muon's decay of the mean gradient, SGD's of the sum."""
    weight_decay: float = 0.1
    """Decoupled, of the layers' matrices alone; times the learning rate per step."""
    max_grad_norm: float = 1.0
    """Gradients of all parameters together are scaled down to this norm."""

    def __post_init__(self):
        """Refuses what no optimizer takes."""
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.weight_decay < 0:
            raise ValueError(f"{self.weight_decay=} must be at least 0")
        if not self.max_grad_norm > 0:
            raise ValueError(f"{self.max_grad_norm=} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: the model, the text, and everything that decides the result."""

    model: architectures.Architecture
    corpus: corpora.CorpusConfig = corpora.STANDARD_LIBRARY
    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: int = 16
    """Windows per step."""
    seq_len: int = 256
    """Predictions per window."""
    num_steps: int = 1000
    """Where the run ends; those of a run that it started from count."""
    learning_rate: float = 3e-3
    """The peak of the schedule."""
    warmup_steps: int = 100
    """Steps of linear rise from zero to the peak."""
    cooldown_steps: int = 200
    """Last steps, of linear fall to zero."""
    seed: int = 0
    """Of the initial parameters and of the order of the text."""
    report_every: int = 10
    """Steps per compiled call, and per line of the curve."""
    checkpoint_every: int = 100
    """Steps that a killed run may lose."""

    def __post_init__(self):
        """Refuses sizes that cannot be."""
        for name in (
            *("batch_size", "seq_len", "num_steps", "report_every"),
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup_steps", "cooldown_steps"):
            if not 0 <= getattr(self, name) <= self.num_steps:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be in [0, {self.num_steps=}]"
                )
        if not self.learning_rate > 0:
            raise ValueError(f"{self.learning_rate=} must be above 0")
        if self.seq_len > self.model.max_positions:
            raise ValueError(
                f"{self.seq_len=} must be at most {self.model.max_positions=}"
            )
        if self.model.vocab_size < corpora.VOCAB_SIZE:
            raise ValueError(
                f"{self.model.vocab_size=} must be at least {corpora.VOCAB_SIZE}"
            )


class Schedule(NamedTuple):
    """Warm-up, a stable stretch, linear cool-down; arrays, so no value recompiles.

    Attributes:
      peak: learning rate of the stable stretch.
      warmup: steps of linear rise.
      cooldown: steps of linear fall to zero, the last ones.
      end: number of steps in all.

    Source: Hägele et al. 2024, arXiv:2405.18392, section 3.
    """

    peak: Float32[Array, ""]
    warmup: Int32[Array, ""]
    cooldown: Int32[Array, ""]
    end: Int32[Array, ""]

    @classmethod
    def of(cls, config: TrainConfig) -> "Schedule":
        """Reads a schedule off a run's config."""
        counts = (config.warmup_steps, config.cooldown_steps, config.num_steps)
        return cls(jnp.float32(config.learning_rate), *map(jnp.int32, counts))

    def at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The learning rate of a step, counted from 0."""
        done = (step + 1).astype(jnp.float32)
        left = (self.end - step).astype(jnp.float32)
        # Without a warm-up or cool-down the quotient is at least one, or infinite.
        rise = done / self.warmup.astype(jnp.float32)
        fall = left / self.cooldown.astype(jnp.float32)
        return self.peak * jnp.minimum(jnp.float32(1), jnp.minimum(rise, fall))
