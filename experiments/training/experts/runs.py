"""Dense models and mixtures of equal active compute, trained and scored alike."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models import Experts, ModelConfig, transformer
from scaling.corpora import corpora, streams
from scaling.sweeps import Finished, Workers
from scaling.training import OptimizerConfig, TrainConfig, architectures, objectives

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


def make_model(kind: Kind, width: int, shapes: Shapes) -> ModelConfig:
    """Gives the model of a kind and width."""
    size = shapes.mlp_ratio * width
    experts = Experts(
        num_experts=shapes.num_experts, top_k=shapes.top_k, size=size // shapes.top_k
    )
    if kind == "unbalanced":
        experts = dataclasses.replace(experts, balance_weight=0.0)
    return architectures.transformer(
        width,
        num_heads=width // _HEAD_DIM,
        num_layers=shapes.num_layers,
        mlp_size=size,
        vocab_size=corpora.VOCAB_SIZE,
        seq_len=shapes.seq_len,
        experts=None if kind == "dense" else experts,
    )


def num_steps(width: int, shapes: Shapes) -> int:
    """Counts the steps of every run of a width, whatever its kind."""
    weights = architectures.parameters(make_model("dense", width, shapes)).matmul
    tokens = shapes.tokens_per_param * weights
    return max(4, round(tokens / (shapes.batch_size * shapes.seq_len)))


class Score(NamedTuple):
    """What a run is worth.

    Attributes:
      loss: nats per token of held-out text.
      loss_se: its standard error.
      loads: see `Run`.
    """

    loss: float
    loss_se: float
    loads: np.ndarray


def score(
    corpus: streams.Corpus,
    num_windows: int,
    run: TrainConfig,
    params: transformer.Params,
) -> Score:
    """Scores a run, and counts what its experts got."""
    found = objectives.score_stream(
        params,
        corpus.held_out,
        model=run.model,
        seq_len=run.seq_len,
        num_windows=num_windows,
    )
    loads = np.zeros((0, 0))
    if isinstance(run.model, ModelConfig) and run.model.experts is not None:
        windows = objectives.stream_windows(
            corpus.held_out, seq_len=run.seq_len, num_windows=min(num_windows, 64)
        )
        output = _outputs(run.model)(params, jnp.asarray(windows[:, :-1]))
        loads = np.asarray(output.loads, np.float64)
    return Score(found.loss, found.loss_se, loads)


def train(
    job: Job, *, shapes: Shapes, corpus: corpora.CorpusConfig, workers: Workers
) -> tuple[Run, transformer.Params]:
    """Trains and scores one model.

    Raises:
      ValueError: the run diverged.
      branching.Stopped: somebody asked to stop before its end.
    """
    kind, width, learning_rate, seed = job
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
    )
    [done] = workers.train([config], _shown)
    if done.score is None or done.params is None:
        raise ValueError(f"{kind} of width {width} diverged at {learning_rate=}")
    counted = architectures.parameters(model)
    flops = architectures.training_flops(
        model, batch=shapes.batch_size, sequence=shapes.seq_len
    )
    run = Run(
        kind=kind,
        width=width,
        learning_rate=learning_rate,
        seed=seed,
        num_params=counted.total,
        num_active=counted.matmul,
        num_tokens=steps * shapes.batch_size * shapes.seq_len,
        flops=float(steps) * flops,
        loss=done.score.loss,
        loss_se=done.score.loss_se,
        seconds=done.seconds,
        loads=done.score.loads,
    )
    return run, done.params


def _shown(end: Finished) -> str:
    loss = np.nan if end.score is None else end.score.loss
    return f"width {end.run.model.hidden_size}: {loss:.3f} nats a token"


@functools.cache
def _outputs(model: ModelConfig):
    return jax.jit(functools.partial(transformer.outputs, config=model))
