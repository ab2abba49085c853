"""Configuration of a training run: all that determines its result.

Plain values; `train` and `step` use them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jaxkv.models import ModelConfig, Params, is_selection_bias
from jaxkv.validation import (
    ConfigRecord,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
)
from scaling.corpora import STANDARD_LIBRARY, AnyCorpus
from scaling.costs import Layout
from scaling.training import architectures, meshes
from scaling.training.transformer_rows import ONE


class OptimizerConfig(ConfigRecord):
    """Optimizer settings; the learning rate is in `LearningRateSchedule`."""

    kind: Literal["muon", "adamw", "sgd", "adafactor", "lion"] = "muon"
    """`muon`: Muon for the layers' matrices, AdamW for other parameters; `sgd`: with
    momentum, without dampening."""
    beta1: Annotated[float, Range(0, 1, "[)")] = 0.9
    """AdamW's decay of the mean gradient; Lion's weight of it in an update."""
    beta2: Annotated[float, Range(0, 1, "[)")] = 0.95
    """AdamW's decay of the mean square gradient; Lion's of the mean gradient."""
    momentum: Annotated[float, Range(0, 1, "[)")] = 0.95
    """Muon's decay of the mean gradient, and SGD's of its sum."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the layers' matrices, times the learning rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient of all parameters; infinite for no clipping."""


class StepConfig(ConfigRecord):
    """Settings of a step for speed and memory; the result changes by rounding only."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass; parameters and moments are float32."""
    accumulation: PositiveInt = 1
    """Gradient accumulation: pieces of a device's batch that are computed one after
    another; micro-batches of a pipeline. Load-balancing losses are those of a piece."""
    remat: bool = False
    """True to keep only the results of products for the backward pass, and to recompute
    other activations."""
    layout: Layout = ONE
    """Division of model, batch and optimizer state over devices."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Pipeline schedule, see `pipeline`."""

    def __post_init__(self) -> None:
        """Validates the settings."""
        super().__post_init__()
        if self.remat and self.layout.pipeline > 1:
            raise ValueError(
                f"remat={self.remat!r} must be False with pipeline stages, which "
                "recompute in any case"
            )

    def check(self, batch_size: int) -> None:
        """Checks that a batch divides into pieces and devices.

        Raises:
          ValueError: it does not divide.
        """
        if batch_size % (self.accumulation * self.layout.data):
            raise ValueError(
                f"{batch_size=} must be a multiple of "
                f"accumulation={self.accumulation} times "
                f"layout.data={self.layout.data}"
            )

    def cast(self, params: Params) -> Params:
        """Returns the parameters in the type of the forward pass.

        Selection biases of experts remain float32.
        """
        if self.dtype == "float32":
            return params
        return jax.tree_util.tree_map_with_path(
            lambda path, p: p if is_selection_bias(path) else p.astype(self.dtype),
            params,
        )


PLAIN_STEP = StepConfig()


SCALED_FAMILIES = ("llama", "granite")
"""Families of `mup`; the last one's `config.json` has its factors."""

type ScheduleName = Literal["wsd", "cosine", "constant", "stable"]
"""Name of a learning rate schedule; `stable` is read as `wsd`, which it once named."""


class TrainConfig(ConfigRecord):
    """One training run: model, corpus, and all that determines the result."""

    model: architectures.Architecture
    corpus: AnyCorpus = STANDARD_LIBRARY
    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: PositiveInt = 16
    """Windows per step."""
    seq_len: PositiveInt = 256
    """Predictions per window."""
    num_steps: PositiveInt = 1000
    """Last step of the run; steps of a run that it started from count."""
    learning_rate: PositiveFloat = 3e-3
    """Peak of the learning rate schedule."""
    warmup_steps: int = 100
    """Steps of linear warm-up from zero to the peak."""
    cooldown_steps: int = 200
    """Last steps, of linear decay; a cosine decays over all steps after the warm-up."""
    schedule: ScheduleName = "wsd"
    """`wsd`: warm-up, stable, (linear) decay; `cosine`: half a cosine after warm-up;
    `constant`: the peak after warm-up, without a cool-down."""
    final_share: Share = 0.0
    """Share of the peak at which the schedule ends."""
    parametrization: Literal["standard", "mup"] = "standard"
    """`mup`: maximal update parametrization, so that one learning rate suits all
    widths. With m = hidden_size / base_width, the layers' matrices have 1 / m of the
    initial variance and of AdamW's rate (weight decay is not scaled), logits are
    divided by m, and scores are q k / head_dim. Embeddings, norms and biases are as in
    `standard`. Source: Yang et al. 2022, arXiv:2203.03466, table 8 and section 4."""
    base_width: PositiveInt = 32
    """Width at which `mup` has the standard variance, rates and logits."""
    how: StepConfig = PLAIN_STEP
    """Settings of the computation of a step."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the corpus."""
    report_every: PositiveInt = 10
    """Steps per compiled call, and per line of the curve."""
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints, the most that a killed run loses."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        if self.schedule == "stable":
            object.__setattr__(self, "schedule", "wsd")
        super().__post_init__()
        for name in ("warmup_steps", "cooldown_steps"):
            Range(0, self.num_steps).check(name, getattr(self, name))
        self.how.check(self.batch_size)
        layout = self.how.layout
        meshes.check_trainable(self.model, layout, sequence_length=self.seq_len)
        if self.optimizer.kind == "adafactor" and layout.num_devices > layout.data:
            raise ValueError(
                f"optimizer.kind={self.optimizer.kind!r} needs whole parameters: "
                f"{layout=} must divide only the data"
            )
        if self.optimizer.kind == "adafactor" and layout.zero:
            raise ValueError(
                f"optimizer.kind={self.optimizer.kind!r} must have {layout.zero=} 0"
            )
        if self.parametrization == "mup":
            self._check_scalable()
        if self.seq_len > self.model.max_positions:
            raise ValueError(
                f"seq_len={self.seq_len} must be at most "
                f"model.max_positions={self.model.max_positions}"
            )
        if self.model.vocab_size < self.corpus.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} must be at least "
                f"corpus.vocab_size={self.corpus.vocab_size}"
            )

    def _check_scalable(self) -> None:
        """Checks that maximal update is defined for the model and the optimizer."""
        if self.optimizer.kind != "adamw":
            raise ValueError(
                f"parametrization='mup' needs optimizer.kind='adamw', not "
                f"{self.optimizer.kind!r}"
            )
        model = self.model
        if (
            not isinstance(model, ModelConfig)
            or model.experts is not None
            or model.latent is not None
            or model.recurrence is not None
            or model.family not in SCALED_FAMILIES
        ):
            raise ValueError(
                "parametrization='mup' needs a dense transformer of family "
                f"{' or '.join(SCALED_FAMILIES)}, without experts"
            )

    @property
    def hidden_rate(self) -> float:
        """Factor on rate and initial variance of the layers' matrices."""
        if self.parametrization == "standard":
            return 1.0
        return self.base_width / self.model.hidden_size

    @property
    def scaled_model(self) -> architectures.Architecture:
        """The model with the factors of the parametrization on logits and scores."""
        model = self.model
        if self.parametrization == "standard" or not isinstance(model, ModelConfig):
            return model
        return dataclasses.replace(
            model,
            logit_scale=model.logit_scale * self.hidden_rate,
            attention_scale=1 / model.head_dim,
            family=SCALED_FAMILIES[-1],
        )

    @property
    def num_tokens(self) -> int:
        """Number of predictions of the whole run."""
        return self.num_steps * self.batch_size * self.seq_len

    @property
    def flops(self) -> float:
        """Exact operations of the whole run, with causal attention."""
        step = architectures.training_flops(
            self.model, batch=self.batch_size, sequence=self.seq_len
        )
        return float(step) * self.num_steps


def steps_taken(lengths: Sequence[int], cooldowns: Sequence[int]) -> int:
    """Returns the steps of a trunk and its branches, for runs of rising length.

    The cooldowns are the last steps of each run, which it shares with no longer run.
    """
    return lengths[-1] - cooldowns[-1] + sum(cooldowns)


class LearningRateSchedule(NamedTuple):
    """A learning rate for every step; arrays, so no value recompiles.

    Attributes:
      peak: learning rate of the stable phase.
      warmup: steps of linear warm-up.
      cooldown: last steps, of decay.
      end: total number of steps.
      final_share: share of the peak at the end of the decay.
      is_cosine: True if the decay is half a period of a cosine, False if it is linear.

    Sources: Hägele et al. 2024, arXiv:2405.18392, section 3; the cosine, Loshchilov &
    Hutter 2016, arXiv:1608.03983, equation 5.
    """

    peak: Float32[Array, ""]
    warmup: Int32[Array, ""]
    cooldown: Int32[Array, ""]
    end: Int32[Array, ""]
    final_share: Float32[Array, ""]
    is_cosine: Bool[Array, ""]

    @classmethod
    def of(cls, config: TrainConfig) -> "LearningRateSchedule":
        """Returns the schedule of a run's config."""
        is_cosine = config.schedule == "cosine"
        after = config.num_steps - config.warmup_steps
        cooldown = after if is_cosine else config.cooldown_steps
        if config.schedule == "constant":
            cooldown = 0
        counts = (config.warmup_steps, cooldown, config.num_steps)
        return cls(
            jnp.float32(config.learning_rate),
            *map(jnp.int32, counts),
            jnp.float32(config.final_share),
            jnp.bool_(is_cosine),
        )

    @classmethod
    def constant(cls, rate: float) -> "LearningRateSchedule":
        """Returns a constant schedule."""
        zero = jnp.int32(0)
        end = jnp.int32(2**31 - 1)
        return cls(jnp.float32(rate), zero, zero, end, jnp.float32(0), jnp.bool_(False))

    def at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the learning rate of a step, counted from 0."""
        one = jnp.float32(1)
        done = (step + 1).astype(jnp.float32)
        left = (self.end - step).astype(jnp.float32)
        # Without a warm-up or cool-down the quotient is at least 1, or infinite.
        rise = jnp.minimum(one, done / self.warmup.astype(jnp.float32))
        fall = jnp.minimum(one, left / self.cooldown.astype(jnp.float32))
        turned = (one - jnp.cos(jnp.float32(jnp.pi) * fall)) / 2
        fall = jnp.where(self.is_cosine, turned, fall)
        fall = self.final_share + (one - self.final_share) * fall
        return self.peak * jnp.minimum(rise, fall)
