"""Trains and scores dense models and mixtures of equal active compute."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments import lab
from jaxkv import models
from jaxkv.models import Experts, ModelConfig, Params
from scaling import training
from scaling.corpora import STANDARD_LIBRARY, VOCAB_SIZE, Corpus, CorpusConfig
from scaling.sweeps import FinishedRun, Workers
from scaling.training import (
    OptimizerConfig,
    TrainConfig,
    count_model_parameters,
    score_stream,
    stream_windows,
)

Kind = Literal["dense", "mixture", "unbalanced"]
"""`unbalanced` is a mixture trained without the load-balancing loss."""
PAIR: tuple[Kind, Kind] = ("dense", "mixture")
"""Compared kinds."""

type Job = tuple[Kind, int, float, int]
"""Kind, width, learning rate and seed of a run."""

_HEAD_DIM = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shape parameters that all models share."""

    num_layers: int = 2
    mlp_ratio: int = 3
    """FFN width of a dense model over its hidden size; gated, so 3 matrices."""
    num_experts: int = 8
    top_k: int = 2
    """Experts per token. Each has 1/top_k of the dense FFN's width, so that both models
    have equal active parameters, except for the router."""
    seq_len: int = 128
    batch_size: int = 16
    """Windows per step."""
    tokens_per_param: float = 20.0
    """Trained tokens over the matrix parameters of the dense model of that width."""


class Config(lab.ConfigRecord):
    """Models, training text and tuning."""

    widths: Annotated[tuple[int, ...], lab.Ascending(8, minimum=3)] = (
        16,
        24,
        32,
        40,
        48,
    )
    """Hidden sizes, ascending multiples of 8; one pair of models each."""
    num_tuned: int = 2
    """Number of smallest widths at which both kinds try every learning rate."""
    learning_rates: Annotated[lab.PositiveFloats, lab.Entries(1)] = (
        6e-3,
        1.2e-2,
        2.4e-2,
        4.8e-2,
    )
    """Peak learning rates at the smallest width; rates scale as 1 / width (Yang et al.
    2022, arXiv:2203.03466, table 3). Each kind uses its best rate at the tuned
    widths."""
    num_repeated: int = 5
    """Number of smallest widths with a second seed."""
    shapes: Shapes = Shapes()
    corpus: CorpusConfig = STANDARD_LIBRARY
    num_threads: lab.PositiveInt = 2
    """Models trained concurrently, so that compilation overlaps with training. Results
    do not depend on it."""
    num_windows: Annotated[int, lab.Range(2)] = 512
    """Held-out windows that are scored."""
    num_resamples: Annotated[int, lab.Range(2)] = 1000
    """Resamples of the runs for intervals."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if any(width % 8 for width in self.widths):
            raise ValueError(f"widths={self.widths!r} must be multiples of 8")
        num_widths = len(self.widths)
        for name in ("num_tuned", "num_repeated"):
            lab.Range(0, num_widths).check(name, getattr(self, name))
        if len(self.learning_rates) != 1 and not self.num_tuned:
            raise ValueError("several learning rates need num_tuned of at least 1")

    def scaled(self, rate: float, width: int) -> float:
        """Returns a learning rate of the smallest width, scaled to another width."""
        return rate * self.widths[0] / width

    @property
    def shown(self) -> int:
        """Width whose expert loads are compared."""
        return self.widths[len(self.widths) // 2]


class MixtureScore(NamedTuple):
    """Held-out loss and routing of a run.

    Attributes:
      loss: nats per token of held-out text, without the load-balancing loss.
      loss_se: standard error of the loss.
      loads: share of held-out tokens; empty for a dense model.
      router: router weights of the first layer; empty for a dense model.
    """

    loss: float
    loss_se: float
    loads: Float[np.ndarray, "mixtures experts"]
    router: Float[np.ndarray, "experts hidden"]


class TrainingRun(NamedTuple):
    """One training run.

    Attributes:
      row: values by column of `Result.runs`.
      score: score of the run.
    """

    row: dict[str, Any]
    score: MixtureScore

    def is_of(self, kind: Kind, width: int) -> bool:
        """Returns True for the first run of a kind and width."""
        row = self.row
        return (row["kind"], row["width"], row["seed"]) == (kind, width, 0)


def tuning_jobs(config: Config) -> list[Job]:
    """Returns the jobs that tune the learning rates."""
    return [
        (kind, width, config.scaled(rate, width), 0)
        for width in config.widths[: config.num_tuned]
        for rate in config.learning_rates
        for kind in PAIR
    ]


def best_rates(
    config: Config, training_runs: Sequence[TrainingRun]
) -> Mapping[Kind, float]:
    """Returns each kind's best rate on average over the tuned widths."""
    rows = [run.row for run in training_runs]
    names = ("kind", "width", "learning_rate", "seed")
    losses = {tuple(row[name] for name in names): row["loss"] for row in rows}
    tuned = config.widths[: config.num_tuned]

    def mean(kind: Kind, rate: float) -> float:
        keys = [(kind, width, config.scaled(rate, width), 0) for width in tuned]
        return float(np.mean([losses.get(key, np.inf) for key in keys] or [0.0]))

    best: dict[Kind, float] = {
        kind: min(config.learning_rates, key=functools.partial(mean, kind))
        for kind in PAIR
    }
    return best | {"unbalanced": best["mixture"]}


def remaining_jobs(config: Config, training_runs: Sequence[TrainingRun]) -> list[Job]:
    """Returns the jobs after tuning, at each kind's best rate."""
    rates = best_rates(config, training_runs)
    by_seed = config.widths[config.num_tuned :], config.widths[: config.num_repeated]
    remaining: list[tuple[Kind, int, int]] = [
        (kind, width, seed)
        for seed, widths in enumerate(by_seed)
        for width in widths
        for kind in PAIR
    ]
    remaining.append(("unbalanced", config.shown, 0))
    return [(k, width, config.scaled(rates[k], width), x) for k, width, x in remaining]


def make_model(kind: Kind, width: int, shapes: Shapes) -> ModelConfig:
    """Returns the model of a kind and width."""
    size = shapes.mlp_ratio * width
    experts = Experts(
        num_experts=shapes.num_experts, top_k=shapes.top_k, size=size // shapes.top_k
    )
    if kind == "unbalanced":
        experts = dataclasses.replace(experts, balance_weight=0.0)
    dense = training.transformer(
        width,
        num_heads=width // _HEAD_DIM,
        num_layers=shapes.num_layers,
        mlp_size=size,
        vocab_size=VOCAB_SIZE,
        seq_len=shapes.seq_len,
    )
    return dense if kind == "dense" else dataclasses.replace(dense, experts=experts)


def steps_for_width(width: int, shapes: Shapes) -> int:
    """Returns the steps of a run, equal for all kinds of a width."""
    weights = count_model_parameters(make_model("dense", width, shapes)).matmul
    tokens = shapes.tokens_per_param * weights
    return max(4, round(tokens / (shapes.batch_size * shapes.seq_len)))


def score_mixture(
    corpus: Corpus,
    num_windows: int,
    run: TrainConfig,
    params: Params,
) -> MixtureScore:
    """Scores a run and measures its expert loads."""
    score = score_stream(
        params,
        corpus.held_out,
        model=run.model,
        seq_len=run.seq_len,
        num_windows=num_windows,
    )
    loads = router = np.zeros((0, 0))
    if isinstance(run.model, ModelConfig) and run.model.experts is not None:
        windows = stream_windows(
            corpus.held_out, seq_len=run.seq_len, num_windows=min(num_windows, 64)
        )
        output = _outputs(run.model)(params, jnp.asarray(windows[:, :-1]))
        loads = np.asarray(output.loads, np.float64)
        router = np.asarray(params["layers"][0]["mixture"]["router"]["weight"])
    return MixtureScore(score.loss, score.loss_se, loads, router)


@functools.cache
def _outputs(model: ModelConfig):
    return jax.jit(functools.partial(models.outputs, config=model))


def train_expert_model(job: Job, *, config: Config, workers: Workers) -> TrainingRun:
    """Trains and scores one model.

    Raises:
      ValueError: the run diverged.
      branching.Stopped: training was stopped before its end.
    """
    kind, width, learning_rate, seed = job
    shapes = config.shapes
    steps = steps_for_width(width, config.shapes)
    run = TrainConfig(
        model=make_model(kind, width, shapes),
        corpus=config.corpus,
        optimizer=OptimizerConfig(kind="adamw"),
        batch_size=shapes.batch_size,
        seq_len=shapes.seq_len,
        num_steps=steps,
        learning_rate=learning_rate,
        warmup_steps=steps // 10,
        cooldown_steps=steps // 5,
        seed=seed,
    )

    def shown(end: FinishedRun) -> str:
        return f"width {width}: {end.loss:.3f} nats a token"

    [done] = workers.train([run], shown)
    if done.score is None:
        raise ValueError(f"{kind} of width {width} diverged at {learning_rate=}")
    counted = count_model_parameters(run.model)
    row = {
        "kind": kind,
        "width": width,
        "learning_rate": learning_rate,
        "seed": seed,
        "num_params": counted.total,
        "num_active": counted.matmul,
        "num_tokens": run.num_tokens,
        "flops": run.flops,
        "loss": done.score.loss,
        "loss_se": done.score.loss_se,
        "seconds": done.seconds,
    }
    return TrainingRun(row, done.score)
