"""Trains models of equal active compute: kinds of attention, of balance, DeepSeek's."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float
from scipy import stats

from experiments import lab
from jaxkv import validation
from jaxkv.models import Experts, LatentConfig, ModelConfig
from scaling import training
from scaling.corpora import STANDARD_LIBRARY, VOCAB_SIZE, Corpus, CorpusConfig
from scaling.training import (
    NEXT_TOKEN,
    MultiTokenPrediction,
    StreamScore,
    TrainConfig,
    TrainingObjective,
    TrainResult,
    score_stream,
    serving_config,
    training_flops,
)

Kind = Literal[
    "MHA", "GQA", "MQA", "MLA", "balanced by loss", "balanced by bias", "DeepSeek"
]
"""Attention of dense models, balance of mixtures with MLA, and all three ideas: MLA,
experts that are balanced by bias, and multi-token prediction."""
BLOCK_KINDS: tuple[Kind, ...] = get_args(Kind)
ATTENTIONS: tuple[Kind, ...] = ("MHA", "GQA", "MQA", "MLA")
BALANCES: tuple[Kind, ...] = ("balanced by loss", "balanced by bias")
DENSE: Kind = "MHA"
"""The dense model whose compute the models share."""
FULL_BLOCK: Kind = "DeepSeek"


class BlockShapes(lab.ConfigRecord):
    """Shape parameters of the models."""

    width: int = 64
    num_layers: int = 3
    num_dense_layers: int = 1
    """First layers of mixtures that have an MLP."""
    num_heads: int = 8
    head_dim: int = 16
    """Width of a head; of latent attention without the rotary part."""
    num_groups: int = 2
    """KV heads of GQA."""
    mlp_size: int = 192
    """FFN width of the MHA model. Other widths follow from equal compute."""
    kv_rank: int = 64
    """Width of the latent: 4 heads as in DeepSeek-V2, arXiv:2405.04434, section
    2.1.4."""
    rope_dim: int = 8
    """Rotary width of latent attention: half a head."""
    num_experts: int = 16
    top_k: int = 3
    expert_size: int = 30
    """FFN width of a routed expert. That of the shared expert follows from equal
    compute."""
    bias_rate: float = 4e-3
    """Change of a selection bias per step; 4 times that of DeepSeek-V3, whose training
    has more steps."""
    balance_weight: float = 0.01
    """Weight of the auxiliary loss."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        validation.check_fields(self, num_dense_layers=0)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_groups={self.num_groups}"
            )


class Config(lab.ConfigRecord):
    """Models, training text, and served prompts."""

    shapes: BlockShapes = BlockShapes()
    kinds: Annotated[tuple[Kind, ...], lab.Choices(BLOCK_KINDS)] = BLOCK_KINDS
    """Trained kinds."""
    num_seeds: lab.PositiveInt = 6
    """Runs of each kind, with seeds 0, 1, ..., which also order the text."""
    corpus: CorpusConfig = STANDARD_LIBRARY
    seq_len: lab.PositiveInt = 128
    batch_size: lab.PositiveInt = 16
    """Windows per step."""
    num_steps: Annotated[int, lab.Range(10)] = 300
    learning_rate: float = 2e-2
    """Peak learning rate of all models: the best of 0.005, 0.01, 0.02 and 0.04 for the
    MHA model after 150 steps. The first tenth of the steps is warm-up, the last 3
    tenths decay to zero."""
    num_windows: Annotated[int, lab.Range(2)] = 1024
    """Held-out windows that are scored."""
    num_prompts: int = 16
    """Held-out prompts, continued greedily by the models of seed 0."""
    prompt_tokens: Annotated[int, lab.Range(2)] = 32
    output_tokens: lab.PositiveInt = 96
    """Tokens of each answer."""
    num_drafts: lab.PositiveInt = 3
    """Drafts per step of the module for multi-token prediction."""
    batches: lab.AscendingInts = (1,)
    """Sequences that are served concurrently."""
    rounds: lab.PositiveInt = 7
    """Rounds in which all served models alternate."""
    folder: str = ""
    """Folder of checkpoints to resume from; empty: not kept."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.batches and self.num_prompts % max(self.batches):
            raise ValueError(
                f"num_prompts={self.num_prompts} must be a multiple of "
                f"batches={self.batches}"
            )

    def run_of(self, kind: Kind, seed: int) -> TrainConfig:
        """Returns the training run of a kind and seed."""
        steps = self.num_steps
        return TrainConfig(
            model=make_block_model(kind, self.shapes, self.seq_len),
            corpus=self.corpus,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            num_steps=steps,
            learning_rate=self.learning_rate,
            warmup_steps=steps // 10,
            cooldown_steps=3 * steps // 10,
            seed=seed,
            report_every=max(1, steps // 20),
            checkpoint_every=max(1, steps // 2),
        )


class TrainedModel(NamedTuple):
    """One trained model.

    Attributes:
      kind: kind of the model.
      config: the run.
      result: final parameters and curve.
      score: held-out loss.
    """

    kind: Kind
    config: TrainConfig
    result: TrainResult
    score: StreamScore

    @property
    def model(self) -> ModelConfig:
        """Shape of the model."""
        return serving_config(self.config.model)


def make_block_model(kind: Kind, shapes: BlockShapes, seq_len: int) -> ModelConfig:
    """Returns the model of a kind.

    The FFN width of a dense model, or that of the shared expert, is the one with which
    a training step on windows of `seq_len` has the operations of the MHA model. Modules
    for multi-token prediction are not counted: serving without drafts skips them.
    """
    x = shapes
    base = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=x.width,
        num_layers=x.num_layers,
        num_q_heads=x.num_heads,
        num_kv_heads=x.num_heads,
        head_dim=x.head_dim,
        mlp_size=x.mlp_size,
        max_positions=max(1024, seq_len),
    )
    if kind == DENSE:
        return base
    wanted = _step_flops(base, seq_len)
    if kind in ("GQA", "MQA"):
        groups = x.num_groups if kind == "GQA" else 1
        base = dataclasses.replace(base, num_kv_heads=groups)
    else:
        latent = LatentConfig(
            kv_rank=x.kv_rank,
            nope_dim=x.head_dim,
            rope_dim=x.rope_dim,
            value_dim=x.head_dim,
        )
        width = x.head_dim + x.rope_dim
        base = dataclasses.replace(base, head_dim=width, latent=latent)

    def with_mlp(size: int) -> ModelConfig:
        return dataclasses.replace(base, mlp_size=size)

    dense = _equal_compute(with_mlp, wanted, seq_len)
    if kind in ATTENTIONS:
        return dense
    by_bias = kind != "balanced by loss"
    # Both balances route by the same function: without a rate, biases remain zero.
    experts = Experts(
        num_experts=x.num_experts,
        top_k=x.top_k,
        size=x.expert_size,
        scoring="sigmoid",
        gate_bias=True,
        num_dense_layers=x.num_dense_layers,
        balance_weight=0.0 if by_bias else x.balance_weight,
        bias_rate=x.bias_rate if by_bias else 0.0,
    )

    def with_shared(size: int) -> ModelConfig:
        return dataclasses.replace(
            dense, experts=dataclasses.replace(experts, shared_size=size)
        )

    mixture = _equal_compute(with_shared, wanted, seq_len)
    if kind != FULL_BLOCK:
        return mixture
    return dataclasses.replace(mixture, num_ahead_layers=1)


def _step_flops(model: ModelConfig, seq_len: int) -> int:
    return training_flops(model, sequence=seq_len)


def _equal_compute(
    make: Callable[[int], ModelConfig], wanted: int, seq_len: int
) -> ModelConfig:
    """Returns the model of a width with the number of operations nearest to `wanted`.

    Raises:
      ValueError: the width would be below 1.
    """
    one, two = (_step_flops(make(size), seq_len) for size in (1, 2))
    size = 1 + round((wanted - one) / (two - one))
    if size < 1:
        raise ValueError(
            f"size={size} must be at least 1: attention and experts have more "
            "operations than the MHA model; increase mlp_size"
        )
    return make(size)


def train_block_model(
    kind: Kind,
    config: TrainConfig,
    folder: Path,
    *,
    corpus: Corpus,
    num_windows: int,
    progress: lab.Progress,
) -> TrainedModel | None:
    """Trains or resumes a model in a folder, and scores it.

    Returns:
      The run; None if it was stopped before its end.

    Raises:
      ValueError: the run diverged.
    """
    model = serving_config(config.model)
    objective: TrainingObjective = NEXT_TOKEN
    if model.num_ahead_layers:
        objective = MultiTokenPrediction()
    training_run = training.train(
        config, folder, objective=objective, progress=progress
    )
    if training_run.status == "stopped":
        return None
    if training_run.status == "diverged":
        raise ValueError(f"{kind} diverged at {config.learning_rate=}")
    score = score_stream(
        training_run.params,
        corpus.held_out,
        model=model,
        seq_len=config.seq_len,
        num_windows=num_windows,
    )
    progress.show(f"{kind}: {score.loss:.3f} nats a token")
    return TrainedModel(kind, config, training_run, score)


def loss_difference(
    runs: list[TrainedModel], ours: Kind, other_kind: Kind
) -> Float[np.ndarray, "3"]:
    """Returns the loss of one kind less that of another, with a 95 % interval.

    Runs of equal seeds see the same text, and all are scored on the same windows. The
    half width has two parts, added as squares: of the held-out windows, two standard
    errors of paired windows; of the seeds, Student's t for their number. A single seed
    has no second part.

    Returns:
      The mean difference, and the ends; NaN without runs of both kinds.
    """
    pairs = [
        (a.score.windows - b.score.windows)
        for a in runs
        for b in runs
        if (a.kind, b.kind) == (ours, other_kind) and a.config.seed == b.config.seed
    ]
    if not pairs:
        return np.full(3, np.nan)
    by_seed = np.stack(pairs).astype(np.float64)
    windows = by_seed.mean(0)
    text = 2 * windows.std(ddof=1) / np.sqrt(len(windows))
    num = len(pairs)
    seeds = 0.0
    if num > 1:
        t = stats.t.ppf(0.975, num - 1)
        seeds = t * by_seed.mean(1).std(ddof=1) / np.sqrt(num)
    half = np.hypot(text, seeds)
    mean = windows.mean()
    return np.array([mean, mean - half, mean + half])
