"""The grid of runs of a sweep: sizes by budgets by learning rates by seeds.

A cell is a model with its number of steps, batch size, weight decay and schedule.
Learning rates compete within a cell, and the best one represents it.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from jaxkv import validation
from jaxkv.validation import (
    Ascending,
    ConfigRecord,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
)
from scaling.corpora import STANDARD_LIBRARY, AnyCorpus
from scaling.costs import ParameterCounts
from scaling.training import (
    Architecture,
    OptimizerConfig,
    ScheduleName,
    TrainConfig,
    count_model_parameters,
    steps_taken,
    training_flops,
)

ADAMW = OptimizerConfig(kind="adamw")
"""AdamW with the default settings of `OptimizerConfig`."""


class SweepConfig(ConfigRecord):
    """A grid of runs, and their mode of execution."""

    models: tuple[Architecture, ...]
    """Configs of the models."""
    corpus: AnyCorpus = STANDARD_LIBRARY
    optimizer: OptimizerConfig = ADAMW
    budgets: Annotated[tuple[float, ...], Range(0, ends="()")] = ()
    """Exact FLOPs of the runs; each model is trained for each budget within the limits
    below."""
    num_tokens: Annotated[tuple[int, ...], Range(0, ends="()")] = ()
    """Tokens of the runs; each model is trained for each of these, too."""
    learning_rates: Annotated[tuple[float, ...], Range(0, ends="()"), Ascending()] = (
        3e-3,
    )
    """Peak rates for a model of `base_width`, in equal ratios, tried in every cell."""
    base_width: PositiveInt = 32
    rate_exponent: float = 1.0
    """A model of width h has the rates times (base_width / h) to this power; 0 with
    `mup`, which scales the rates of matrices itself."""
    parametrization: Literal["standard", "mup"] = "standard"
    """See `TrainConfig.parametrization`; the base width is `base_width`."""
    max_extensions: NonNegativeInt = 2
    """Most rates added to the grid for a cell whose best rate is at the edge."""
    seeds: tuple[int, ...] = (0,)
    """The first seed is for every run; further ones repeat the best run of cells of the
    first `num_repeated` models."""
    num_repeated: NonNegativeInt = 0
    batch_size: PositiveInt = 8
    """Windows per step."""
    batch_sizes: Annotated[tuple[int, ...], Ascending(1, minimum=0)] = ()
    """Windows per step, tried in place of `batch_size`; each divides the largest, so
    that runs of all have the same tokens."""
    weight_decays: Annotated[tuple[float, ...], Ascending(0, minimum=0)] = ()
    """Weight decays, tried in place of `optimizer.weight_decay`."""
    schedules: tuple[ScheduleName, ...] = ()
    """Learning rate schedules, tried in place of `schedule`."""
    seq_len: PositiveInt = 64
    """Predictions per window."""
    warmup_steps: NonNegativeInt = 50
    """Steps of linear warm-up, the same for every run."""
    schedule: ScheduleName = "wsd"
    """Learning rate schedule. `wsd` (warm-up, stable, decay): constant after the
    warm-up, so that runs of one model and rate share a trunk, then linear to zero.
    `cosine`: half a cosine over the run, so that runs share only the warm-up.
    `constant`: never falls, so that a run is the beginning of every longer one."""
    cooldown: Share = 0.4
    """Share of a run's steps in which the rate of `wsd` falls."""
    min_steps: NonNegativeInt = 200
    """Cells of fewer steps are skipped."""
    tokens_per_param: tuple[float, float] = (0.0, math.inf)
    """Cells outside this range are skipped."""
    num_eval_windows: PositiveInt = 1024
    """Held-out windows, the same for every model."""
    keep_models: bool = False
    """True to keep the trained models, as folders that the engine serves."""
    executor: Literal["local", "ray"] = "local"
    mode: Literal["auto", "loop", "vmap"] = "auto"
    """Runs of one model sequentially (`loop`) or as one vmapped program; `auto` times
    both, and the folder keeps the choice."""
    ray_address: str = ""
    """Address of a running cluster; "" uses this machine's, started if necessary."""
    cpus_per_run: PositiveFloat = 1.0
    """CPUs of the cluster for a run."""
    gpus_per_run: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        """Validates the grid."""
        if self.schedule == "stable":
            object.__setattr__(self, "schedule", "wsd")
        super().__post_init__()
        if any(max(self.batch_sizes) % size for size in self.batch_sizes):
            raise ValueError(
                f"batch_sizes={self.batch_sizes!r} must divide the largest one"
            )
        if self.parametrization == "mup" and self.rate_exponent != 0:
            raise ValueError(
                f"rate_exponent={self.rate_exponent:g} must be 0 with "
                "parametrization='mup'"
            )
        if "stable" in self.schedules:
            raise ValueError(f"schedules={self.schedules!r}: 'stable' is named 'wsd'")
        if len({*self.schedules}) < len(self.schedules):
            raise ValueError(f"schedules={self.schedules!r} must be different ones")
        if not self.models:
            raise ValueError(f"models={self.models!r} must name a model")
        if not (self.budgets or self.num_tokens):
            raise ValueError("budgets or num_tokens must not be empty")
        if not self.seeds or len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds!r} must be different ones")
        low, high = self.tokens_per_param
        if not 0 <= low < high:
            raise ValueError(
                f"tokens_per_param={self.tokens_per_param!r} must rise from 0 or more"
            )
        for model in self.models:
            if self.seq_len > model.max_positions:
                raise ValueError(
                    f"seq_len={self.seq_len} must be at most {model.max_positions=}"
                )
        if not list_cells(self):
            raise ValueError(f"no run is left: {_why_none(self)}")

    @property
    def settings(self) -> tuple["RunSetting", ...]:
        """Combinations of batch size, weight decay and schedule."""
        axes = (
            self.batch_sizes or (self.batch_size,),
            self.weight_decays or (self.optimizer.weight_decay,),
            self.schedules or (self.schedule,),
        )
        return tuple(RunSetting(*values) for values in itertools.product(*axes))


class RunSetting(NamedTuple):
    """Batch size in windows, weight decay and schedule of runs."""

    batch_size: int
    weight_decay: float
    schedule: ScheduleName


class ModelCost(NamedTuple):
    """Parameters and training cost of a model.

    Attributes:
      params: parameter counts by every convention.
      flops_per_token: exact training FLOPs, with causal attention.
    """

    params: ParameterCounts
    flops_per_token: float


class Cell(NamedTuple):
    """A model, its number of steps and its setting; learning rates compete within it.

    Attributes:
      model: config of the model.
      num_steps: number of steps.
      setting: batch, weight decay and schedule; None for the first of the sweep.
    """

    model: Architecture
    num_steps: int
    setting: RunSetting | None = None


class Lane(NamedTuple):
    """Learning rate and seed of a run in its cell."""

    learning_rate: float
    seed: int


class RunGroup(NamedTuple):
    """Runs of one model that may be vmapped.

    Attributes:
      model: config of the model.
      lanes: rates and seeds.
      horizons: numbers of steps, rising; every lane is trained for each.
      setting: batch, weight decay and schedule.
    """

    model: Architecture
    lanes: tuple[Lane, ...]
    horizons: tuple[int, ...]
    setting: RunSetting

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of the runs, steps rising."""
        return tuple(Cell(self.model, n, self.setting) for n in self.horizons)


@validation.checks_numbers()
@functools.lru_cache(maxsize=1024)
def count_cost(model: Architecture, seq_len: int) -> ModelCost:
    """Returns a model's parameter counts and training FLOPs per token."""
    flops = training_flops(model, sequence=seq_len)
    return ModelCost(count_model_parameters(model), flops / seq_len)


def list_cells(config: SweepConfig) -> list[Cell]:
    """Lists the cells of a grid, model by model and setting by setting, steps rising.

    Tokens are multiples of those of a step of the largest batch.
    """
    cells = []
    largest = max(config.batch_sizes or (config.batch_size,))
    low, high = config.tokens_per_param
    for model, setting in itertools.product(config.models, config.settings):
        params = count_cost(model, config.seq_len).params.total
        batch_tokens = largest * config.seq_len
        ratio = largest // setting.batch_size
        cells += [
            Cell(model, n * ratio, setting)
            for n in sorted({round(x / batch_tokens) for x in _tokens(config, model)})
            if n * ratio >= max(config.min_steps, 1)
            and low <= n * batch_tokens / params <= high
        ]
    return cells


def _tokens(config: SweepConfig, model: Architecture) -> list[float]:
    """Returns the training tokens of a model for each budget."""
    per_token = count_cost(model, config.seq_len).flops_per_token
    by_budget = [budget / per_token for budget in config.budgets]
    return by_budget + [float(x) for x in config.num_tokens]


def _why_none(config: SweepConfig) -> str:
    """Explains why no model has a run at any budget."""
    max_tokens = max(x for model in config.models for x in _tokens(config, model))
    batch_size = config.settings[0].batch_size
    num_steps = round(max_tokens / (batch_size * config.seq_len))
    if num_steps < 1:
        return (
            f"a step of {batch_size=} windows of {config.seq_len=} tokens is "
            f"more than the {max_tokens:,.0f} tokens that the largest budget allows"
        )
    if num_steps < config.min_steps:
        return (
            f"{config.min_steps=} is more than the {num_steps} steps of "
            f"{batch_size=} windows of {config.seq_len=} tokens that the "
            "largest budget allows"
        )
    return (
        f"{config.tokens_per_param=} leaves out every model and budget that "
        f"{config.min_steps=} does not"
    )


def train_config(config: SweepConfig, cell: Cell, lane: Lane) -> TrainConfig:
    """Returns the training config of a run."""
    setting = cell.setting or config.settings[0]
    decay = setting.weight_decay
    return TrainConfig(
        model=cell.model,
        corpus=config.corpus,
        optimizer=dataclasses.replace(config.optimizer, weight_decay=decay),
        batch_size=setting.batch_size,
        seq_len=config.seq_len,
        num_steps=cell.num_steps,
        learning_rate=lane.learning_rate,
        warmup_steps=min(config.warmup_steps, cell.num_steps),
        cooldown_steps=_steps_of_fall(config, cell.num_steps, setting.schedule),
        schedule=setting.schedule,
        parametrization=config.parametrization,
        base_width=config.base_width,
        seed=lane.seed,
    )


def _steps_of_fall(config: SweepConfig, num_steps: int, schedule: ScheduleName) -> int:
    """Returns the number of final steps that a run shares with no longer run."""
    if schedule == "cosine":
        return max(0, num_steps - config.warmup_steps)
    if schedule == "constant":
        return 0
    return round(config.cooldown * num_steps)


_IRRELEVANT = ("report_every", "checkpoint_every")


def run_id(config: SweepConfig, run: TrainConfig, corpus_digest: str) -> str:
    """Returns a digest of all inputs that determine the record of a run."""
    return _digest(_deciding(config, run, corpus_digest))


def cell_id(config: SweepConfig, run: TrainConfig, corpus_digest: str) -> str:
    """Returns a digest of a run without its learning rate and seed."""
    deciding = _deciding(config, run, corpus_digest)
    return _digest({k: v for k, v in deciding.items() if k not in Lane._fields})


def group_id(config: SweepConfig, group: RunGroup, corpus_digest: str) -> str:
    """Returns a digest of runs that are executed together."""
    runs = [train_config(config, x, lane) for x in group.cells for lane in group.lanes]
    return _digest([run_id(config, run, corpus_digest) for run in runs])


def _deciding(config: SweepConfig, run: TrainConfig, corpus_digest: str) -> dict:
    # The corpus is represented by its digest, independent of its location.
    left_out = {*_IRRELEVANT, "corpus"}
    if run.parametrization == "standard":  # digests are those of earlier configs
        left_out |= {"parametrization", "base_width"}
    fields = dataclasses.asdict(run)
    if run.schedule == "wsd":  # digests have its earlier name
        fields["schedule"] = "stable"
    return {k: v for k, v in fields.items() if k not in left_out} | {
        "corpus_digest": corpus_digest,
        "num_eval_windows": config.num_eval_windows,
    }


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scaled_rate(config: SweepConfig, rate: float, model: Architecture) -> float:
    """Returns the rate of a model, given the rate for `base_width`."""
    scale = (config.base_width / model.hidden_size) ** config.rate_exponent
    return float(f"{rate * scale:.6g}")


def group_flops(config: SweepConfig, groups: list[RunGroup]) -> Iterator[float]:
    """Yields the FLOPs of each group, with shared trunks counted once."""
    for group in groups:
        per_step = count_cost(group.model, config.seq_len).flops_per_token
        per_step *= group.setting.batch_size * config.seq_len
        yield per_step * len(group.lanes) * group_steps(config, group)


def group_steps(config: SweepConfig, group: RunGroup) -> int:
    """Returns the steps of the trunk and the branches of each lane of a group."""
    schedule = group.setting.schedule
    cooled = [_steps_of_fall(config, n, schedule) for n in group.horizons]
    return steps_taken(group.horizons, cooled)
