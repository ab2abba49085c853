"""Dense models and mixtures of equal active compute, trained and scored alike."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.framework import Progress
from jaxkv.models import Experts, ModelConfig, transformer
from scaling.corpora import corpora, streams
from scaling.training import OptimizerConfig, TrainConfig, architectures, objectives
from scaling.training.train import Progress as TrainingProgress
from scaling.training.train import train_in_memory

Kind = Literal["dense", "mixture", "unbalanced"]
"""`unbalanced`: a mixture trained without the load-balancing loss."""
PAIR: tuple[Kind, Kind] = ("dense", "mixture")
"""What is compared."""

type Job = tuple[Kind, int, float, int]
"""Kind, width, learning rate and seed of a run."""

_HEAD_DIM = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What the models have in common."""

    num_layers: int = 2
    mlp_ratio: int = 3
    """FFN width of a dense model over its hidden size; gated, so three matrices."""
    num_experts: int = 8
    top_k: int = 2
    """Experts of a token. Each has 1/top_k of the dense FFN's width, so that a token
    meets as many weights in both models, the router's apart."""
    seq_len: int = 128
    batch_size: int = 16
    """Windows per step."""
    tokens_per_param: float = 20.0
    """Tokens a run is trained on over the weights that a token of the dense model of
    its width is multiplied with."""


SHAPES = Shapes()


class Run(NamedTuple):
    """One training run and its score."""

    kind: Kind
    width: int
    learning_rate: float
    seed: int
    num_params: int
    """All of them, every expert counted."""
    num_active: int
    """Weights that a token is multiplied with."""
    num_tokens: int
    flops: float
    """Of the whole run, of the experts that were used, causal attention."""
    loss: float
    """Nats per token of held-out text, the load-balancing loss not counted."""
    loss_se: float
    seconds: float
    loads: np.ndarray
    """[mixtures, experts], share of held-out tokens; [0, 0] of a dense model."""


class Shared:
    """One bar for the runs of several threads.

    Args:
      progress: who is told in the end.
      num_tokens: of all runs together.
    """

    def __init__(self, progress: Progress, num_tokens: int):
        self._progress, self._lock, self._done = progress, threading.Lock(), 0.0
        self._update = progress.bar("training", num_tokens, "tokens")

    @property
    def stopped(self) -> bool:
        """Whether all should stop."""
        return self._progress.stopped

    def bar(
        self, label: str, total: float | None, unit: str
    ) -> Callable[[float], None]:
        """Counts a run's tokens with those of the others."""
        before = 0.0

        def update(done: float) -> None:
            nonlocal before
            with self._lock:
                self._done += done - before
                before = done
                self._update(self._done)

        return update

    def show(self, content: str) -> None:
        """Passes a line on."""
        with self._lock:
            self._progress.show(content)


def make_model(kind: Kind, width: int, shapes: Shapes) -> ModelConfig:
    """Gives the model of a kind and width."""
    size = shapes.mlp_ratio * width
    experts = Experts(
        num_experts=shapes.num_experts, top_k=shapes.top_k, size=size // shapes.top_k
    )
    if kind == "unbalanced":
        experts = dataclasses.replace(experts, balance_weight=0.0)
    return ModelConfig(
        vocab_size=corpora.VOCAB_SIZE,
        hidden_size=width,
        num_layers=shapes.num_layers,
        num_q_heads=width // _HEAD_DIM,
        num_kv_heads=width // _HEAD_DIM,
        head_dim=_HEAD_DIM,
        mlp_size=size,
        max_positions=shapes.seq_len,
        experts=None if kind == "dense" else experts,
    )


def num_steps(width: int, shapes: Shapes) -> int:
    """Counts the steps of every run of a width, whatever its kind."""
    weights = architectures.parameters(make_model("dense", width, shapes)).matmul
    tokens = shapes.tokens_per_param * weights
    return max(4, round(tokens / (shapes.batch_size * shapes.seq_len)))


def train(
    kind: Kind,
    width: int,
    learning_rate: float,
    seed: int,
    *,
    shapes: Shapes,
    corpus: corpora.CorpusConfig,
    num_windows: int,
    progress: TrainingProgress,
) -> tuple[Run, transformer.Params] | None:
    """Trains and scores one model; nothing if it was stopped before its end.

    Raises:
      ValueError: the text is missing or too short, or the run diverged.
    """
    model, steps = make_model(kind, width, shapes), num_steps(width, shapes)
    config = TrainConfig(
        model=model,
        corpus=corpus,
        optimizer=OptimizerConfig(kind="adamw"),
        batch_size=shapes.batch_size,
        seq_len=shapes.seq_len,
        num_steps=steps,
        learning_rate=learning_rate,
        warmup_steps=steps // 10,
        cooldown_steps=steps // 5,
        seed=seed,
        report_every=-(-steps // 8),
        checkpoint_every=steps,
    )
    text = _corpus(corpus)
    done = train_in_memory(config, text, progress=progress)
    if done.status == "stopped":
        return None
    if done.status == "diverged":
        raise ValueError(f"{kind} of width {width} diverged at {learning_rate=}")
    score = objectives.score_stream(
        *(done.params, text.held_out),
        model=model,
        seq_len=shapes.seq_len,
        num_windows=num_windows,
    )
    counted = architectures.parameters(model)
    flops = architectures.training_flops(
        model, batch=shapes.batch_size, sequence=shapes.seq_len
    )
    loads = np.zeros((0, 0))
    if kind != "dense":
        windows = objectives.stream_windows(
            text.held_out, seq_len=shapes.seq_len, num_windows=min(num_windows, 64)
        )
        found = _outputs(model)(done.params, jnp.asarray(windows[:, :-1])).loads
        loads = np.asarray(found, np.float64)
    run = Run(
        *(kind, width, learning_rate, seed, counted.total, counted.matmul),
        num_tokens=steps * shapes.batch_size * shapes.seq_len,
        flops=float(steps) * flops,
        loss=score.loss,
        loss_se=score.loss_se,
        seconds=done.curve[-1]["duration_s"],
        loads=loads,
    )
    return run, done.params


@functools.cache
def _corpus(config: corpora.CorpusConfig) -> streams.Corpus:
    return corpora.open(config)


@functools.cache
def _outputs(model: ModelConfig):
    return jax.jit(functools.partial(transformer.outputs, config=model))
