"""The family of models of `isoflop`, and how large its sweeps are."""

import dataclasses

from jaxkv import validation
from jaxkv.models.config import ModelConfig
from scaling.corpora import corpora
from scaling.sweeps import SweepConfig, grid
from scaling.training import architectures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Which sizes and budgets to fit, and how much larger the run to foresee is."""

    widths: tuple[int, ...]
    """Of the models that are fitted; the one to foresee is one of this kind, too."""
    budgets: tuple[float, ...]
    """FLOPs, exact ones."""
    num_layers: int = 2
    corpus: corpora.CorpusConfig = corpora.STANDARD_LIBRARY
    learning_rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    """For a model of width 32; other widths have the rates times 32 / width."""
    max_extensions: int = 2
    """How often a cell's rates are extended beyond the best one."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The first for all runs, the others for repetitions."""
    num_repeated: int = 2
    """Of the smallest models, how many are repeated."""
    batch_size: int = 8
    seq_len: int = 64
    warmup_steps: int = 50
    cooldown: float = 0.4
    """Share of a run in which its rate falls."""
    min_steps: int = 300
    """Runs of fewer steps are left out."""
    tokens_per_param: tuple[float, float] = (2.0, 600.0)
    """Runs with fewer or more are left out: they are far from the optimum."""
    num_eval_windows: int = 2048
    """Held-out windows that all models are scored on."""
    held_out_factor: float = 10.0
    """Compute of the run that is foreseen, over the largest budget."""
    bootstrap: int = 2000
    """Resamples behind the intervals."""
    level: float = 0.9
    """Probability of the intervals."""
    folder: str = ""
    """Where runs are kept, for a sweep to be taken up; empty: not kept."""
    keep_models: bool = False
    """Whether the trained models are kept in that folder, for the engine to serve."""

    def __post_init__(self) -> None:
        """Refuses what cannot be foreseen."""
        validation.above(self, "held_out_factor", low=1)
        validation.within(self, "level", low=0, high=1, ends="()")
        validation.at_least(self, "bootstrap", low=2)
        if len(self.budgets) < 3:
            raise ValueError(f"{self.budgets=} must be at least three")
        if self.keep_models and not self.folder:
            raise ValueError(f"{self.keep_models=} needs a folder")
        _ = self.sweep  # refuses the rest

    @property
    def sweep(self) -> SweepConfig:
        """The grid of the runs that are fitted."""
        return SweepConfig(
            models=tuple(
                shape(width, self.num_layers, self.seq_len) for width in self.widths
            ),
            corpus=self.corpus,
            budgets=self.budgets,
            learning_rates=self.learning_rates,
            base_width=BASE_WIDTH,
            max_extensions=self.max_extensions,
            seeds=self.seeds,
            num_repeated=self.num_repeated,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            warmup_steps=self.warmup_steps,
            cooldown=self.cooldown,
            min_steps=self.min_steps,
            tokens_per_param=self.tokens_per_param,
            num_eval_windows=self.num_eval_windows,
            keep_models=self.keep_models,
        )


BASE_WIDTH = 32


def shape(width: int, num_layers: int, seq_len: int) -> ModelConfig:
    """A Llama of some width: heads of 16 or so, an MLP of 8/3 of the width."""
    heads = max(1, width // 16)
    return architectures.transformer(
        width,
        num_heads=heads,
        num_layers=num_layers,
        mlp_size=8 * max(1, round(width / 3)),
        vocab_size=corpora.VOCAB_SIZE,
        seq_len=seq_len,
    )


def nearest(config: Settings, num_params: float) -> ModelConfig:
    """The model of the family with a number of parameters nearest to one."""
    found = [
        shape(width, config.num_layers, config.seq_len)
        for width in (*range(4, 16, 2), *range(16, 2049, 16))
    ]

    def off(model: ModelConfig) -> float:
        params = grid.count(model, config.seq_len).params
        return max(params.total / num_params, num_params / params.total)

    return min(found, key=off)
