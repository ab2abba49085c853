"""Which runs a sweep consists of: sizes by budgets by learning rates by seeds.

A cell is a model with the number of steps that it is trained for. The learning rates
compete in each cell, and the best of them is what its size and its tokens are worth.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from jaxkv import validation
from scaling.corpora import corpora
from scaling.costs import parameters
from scaling.training import OptimizerConfig, TrainConfig, architectures, recipes

ADAMW = OptimizerConfig(kind="adamw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A grid of runs, and how they are carried out."""

    models: tuple[architectures.Architecture, ...]
    """The shapes."""
    corpus: corpora.AnyCorpus = corpora.STANDARD_LIBRARY
    optimizer: OptimizerConfig = ADAMW
    budgets: tuple[float, ...] = ()
    """FLOPs of a run, exact ones; each shape is trained for each, as far as the limits
    below allow."""
    num_tokens: tuple[int, ...] = ()
    """Tokens of a run; each shape is trained for each of these, too."""
    learning_rates: tuple[float, ...] = (3e-3,)
    """Peaks for a model of `base_width`, in equal ratios, tried in every cell."""
    base_width: int = 32
    rate_exponent: float = 1.0
    """A model of width h gets the rates times (base_width / h) to this power."""
    max_extensions: int = 2
    """How often a cell whose best rate is the grid's last gets one more beyond it."""
    seeds: tuple[int, ...] = (0,)
    """The first one is for every run; the others repeat the best of the cells of the
    first `num_repeated` models."""
    num_repeated: int = 0
    batch_size: int = 8
    """Windows per step."""
    seq_len: int = 64
    """Predictions per window."""
    warmup_steps: int = 50
    """Steps of linear rise, the same for every run."""
    schedule: Literal["stable", "cosine"] = "stable"
    """`stable`: constant after the warm-up, so that runs of one model and rate share a
    trunk and branch off it, then linear fall to zero. `cosine`: half a period of a
    cosine that ends with the run, so that runs share nothing but the warm-up."""
    cooldown: float = 0.4
    """Share of a run's steps in which a stable rate falls."""
    min_steps: int = 200
    """Cells of fewer steps are left out."""
    tokens_per_param: tuple[float, float] = (0.0, math.inf)
    """Cells with fewer or more tokens for a parameter are left out."""
    num_eval_windows: int = 1024
    """Held-out windows that every model is scored on, the same ones."""
    keep_models: bool = False
    """Whether the trained models are kept, as folders that the engine serves."""
    executor: Literal["local", "ray"] = "local"
    mode: Literal["auto", "loop", "vmap"] = "auto"
    """Runs of one model one after another, or side by side in one program; `auto`
    times both for a moment, and the folder keeps to the choice."""
    ray_address: str = ""
    """Of a cluster that is there; empty: this machine's, started if need be."""
    cpus_per_run: float = 1.0
    """What a run takes of a cluster's processors."""
    gpus_per_run: float = 0.0

    def __post_init__(self) -> None:
        """Refuses grids that are none."""
        if not self.models:
            raise ValueError(f"models={self.models!r} must name a model")
        if not (self.budgets or self.num_tokens):
            raise ValueError("budgets or num_tokens must not be empty")
        validation.above(self, "budgets", "num_tokens", "learning_rates", finite=True)
        validation.ascending(self, "learning_rates")
        if not self.seeds or len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds!r} must be different ones")
        validation.at_least(
            self, "base_width", "batch_size", "seq_len", "num_eval_windows"
        )
        validation.at_least(
            self, "max_extensions", "num_repeated", "warmup_steps", "min_steps", low=0
        )
        validation.within(self, "cooldown", low=0, high=1)
        low, high = self.tokens_per_param
        if not 0 <= low < high:
            raise ValueError(
                f"tokens_per_param={self.tokens_per_param!r} must rise from 0 or more"
            )
        validation.above(self, "cpus_per_run")
        validation.at_least(self, "gpus_per_run", low=0)
        for model in self.models:
            if self.seq_len > model.max_positions:
                raise ValueError(
                    f"seq_len={self.seq_len} must be at most {model.max_positions=}"
                )
        if not list_cells(self):
            raise ValueError(f"no run is left: {_why_none(self)}")


class ModelCost(NamedTuple):
    """What a model costs.

    Attributes:
      params: its parameters by every convention.
      flops_per_token: of training, exact, attention counted causally.
    """

    params: parameters.ParameterCounts
    flops_per_token: float


class Cell(NamedTuple):
    """A model and how long it is trained: what learning rates compete for."""

    model: architectures.Architecture
    num_steps: int


class Lane(NamedTuple):
    """What sets runs of one cell apart; the rate is the run's own."""

    learning_rate: float
    seed: int


class RunGroup(NamedTuple):
    """Runs of one model that may go side by side.

    Attributes:
      model: its shape.
      lanes: rates and seeds.
      horizons: the numbers of steps, rising; every lane is trained for each.
    """

    model: architectures.Architecture
    lanes: tuple[Lane, ...]
    horizons: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def count_cost(model: architectures.Architecture, seq_len: int) -> ModelCost:
    """Counts a model's parameters, and its FLOPs in training on windows."""
    flops = architectures.training_flops(model, sequence=seq_len)
    return ModelCost(architectures.count_model_parameters(model), flops / seq_len)


def list_cells(config: SweepConfig) -> list[Cell]:
    """Lists the cells of a grid, model by model, each once, steps rising."""
    found = []
    batch_tokens = config.batch_size * config.seq_len
    low, high = config.tokens_per_param
    for model in config.models:
        params = count_cost(model, config.seq_len).params.total
        found += [
            Cell(model, n)
            for n in sorted({round(x / batch_tokens) for x in _tokens(config, model)})
            if n >= max(config.min_steps, 1)
            and low <= n * batch_tokens / params <= high
        ]
    return found


def _tokens(config: SweepConfig, model: architectures.Architecture) -> list[float]:
    """What each budget would train a model on."""
    per_token = count_cost(model, config.seq_len).flops_per_token
    by_budget = [budget / per_token for budget in config.budgets]
    return by_budget + [float(x) for x in config.num_tokens]


def _why_none(config: SweepConfig) -> str:
    """Says what leaves out every model at every budget."""
    most = max(x for model in config.models for x in _tokens(config, model))
    num_steps = round(most / (config.batch_size * config.seq_len))
    if num_steps < 1:
        return (
            f"a step of {config.batch_size=} windows of {config.seq_len=} tokens is "
            f"more than the {most:,.0f} tokens that the largest budget allows"
        )
    if num_steps < config.min_steps:
        return (
            f"{config.min_steps=} is more than the {num_steps} steps of "
            f"{config.batch_size=} windows of {config.seq_len=} tokens that the "
            "largest budget allows"
        )
    return (
        f"{config.tokens_per_param=} leaves out every model and budget that "
        f"{config.min_steps=} does not"
    )


def train_config(config: SweepConfig, cell: Cell, lane: Lane) -> TrainConfig:
    """Writes a run down as `training` knows it."""
    return TrainConfig(
        model=cell.model,
        corpus=config.corpus,
        optimizer=config.optimizer,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        num_steps=cell.num_steps,
        learning_rate=lane.learning_rate,
        warmup_steps=min(config.warmup_steps, cell.num_steps),
        cooldown_steps=_steps_of_fall(config, cell.num_steps),
        schedule=config.schedule,
        seed=lane.seed,
    )


def _steps_of_fall(config: SweepConfig, num_steps: int) -> int:
    """The last steps of a run, which it shares with no longer one."""
    if config.schedule == "cosine":
        return max(0, num_steps - config.warmup_steps)
    return round(config.cooldown * num_steps)


_IRRELEVANT = ("report_every", "checkpoint_every")


def run_id(config: SweepConfig, run: TrainConfig, corpus_digest: str) -> str:
    """Names a run by all that decides its record, and nothing else."""
    return _digest(_deciding(config, run, corpus_digest))


def cell_id(config: SweepConfig, run: TrainConfig, corpus_digest: str) -> str:
    """Names what a run shares with those of other learning rates and seeds."""
    deciding = _deciding(config, run, corpus_digest)
    return _digest({k: v for k, v in deciding.items() if k not in Lane._fields})


def group_id(config: SweepConfig, group: RunGroup, corpus_digest: str) -> str:
    """Names runs that are carried out together."""
    cells = [Cell(group.model, steps) for steps in group.horizons]
    runs = [train_config(config, x, lane) for x in cells for lane in group.lanes]
    return _digest([run_id(config, run, corpus_digest) for run in runs])


def _deciding(config: SweepConfig, run: TrainConfig, corpus_digest: str) -> dict:
    # The text itself, by its digest, wherever it lies.
    left_out = {*_IRRELEVANT, "corpus"}
    fields = dataclasses.asdict(run)
    return {k: v for k, v in fields.items() if k not in left_out} | {
        "corpus_digest": corpus_digest,
        "num_eval_windows": config.num_eval_windows,
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scaled_rate(
    config: SweepConfig, rate: float, model: architectures.Architecture
) -> float:
    """Gives the rate of a model where one of `base_width` would have `rate`."""
    scale = (config.base_width / model.hidden_size) ** config.rate_exponent
    return float(f"{rate * scale:.6g}")


def group_flops(config: SweepConfig, groups: list[RunGroup]) -> Iterator[float]:
    """Yields the FLOPs of each group, its shared trunks counted once."""
    for group in groups:
        per_step = count_cost(group.model, config.seq_len).flops_per_token
        per_step *= config.batch_size * config.seq_len
        yield per_step * len(group.lanes) * group_steps(config, group.horizons)


def group_steps(config: SweepConfig, horizons: tuple[int, ...]) -> int:
    """Counts the steps of a trunk and its branches."""
    cooled = [_steps_of_fall(config, n) for n in horizons]
    return recipes.steps_taken(horizons, cooled)
