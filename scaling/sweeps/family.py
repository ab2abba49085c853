"""Sweeps of one family of models: widths by budgets, and named sweeps.

Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.2, for isoFLOP sweeps.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv import validation
from jaxkv.models import ModelConfig
from jaxkv.validation import ConfigRecord
from scaling import training
from scaling.corpora import STANDARD_LIBRARY, VOCAB_SIZE, CorpusConfig
from scaling.laws import AMOUNTS
from scaling.sweeps import grid
from scaling.sweeps.grid import ADAMW, SweepConfig
from scaling.training import OptimizerConfig, TrainConfig

BASE_WIDTH = 32
"""Width of the model to which a family's learning rates apply."""


@validation.checks_numbers()
def family_shape(width: int, num_layers: int, seq_len: int) -> ModelConfig:
    """Returns a Llama model of a width: heads of about 16, an MLP of 8/3 the width."""
    return training.transformer(
        width,
        num_heads=max(1, width // 16),
        num_layers=num_layers,
        mlp_size=8 * max(1, round(width / 3)),
        vocab_size=VOCAB_SIZE,
        seq_len=seq_len,
    )


@validation.checks_numbers(num_params=AMOUNTS)
def nearest_shape(num_params: float, *, num_layers: int, seq_len: int) -> ModelConfig:
    """Returns the model of the family whose parameter count is nearest, by ratio."""
    shapes = [
        family_shape(width, num_layers, seq_len)
        for width in (*range(4, 16, 2), *range(16, 2049, 16))
    ]

    def off(model: ModelConfig) -> float:
        params = grid.count_cost(model, seq_len).params
        return max(params.total / num_params, num_params / params.total)

    return min(shapes, key=off)


class FamilySweep(ConfigRecord):
    """A sweep of widths by budgets for one family of models."""

    widths: tuple[int, ...]
    """Widths of the fitted models."""
    budgets: tuple[float, ...]
    """Exact FLOPs of the runs."""
    num_layers: int = 2
    corpus: CorpusConfig = STANDARD_LIBRARY
    learning_rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    """Rates for a model of width 32; other widths have the rates times 32 / width."""
    max_extensions: int = 2
    """Largest number of rates that extend a cell's grid beyond its edge."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The first seed is for all runs, further ones for repetitions."""
    num_repeated: int = 2
    """Number of models that are repeated, the smallest ones."""
    batch_size: int = 8
    seq_len: int = 64
    warmup_steps: int = 50
    cooldown: float = 0.4
    """Share of a run in which its rate falls."""
    min_steps: int = 300
    """Runs of fewer steps are skipped."""
    tokens_per_param: tuple[float, float] = (2.0, 600.0)
    """Runs outside this range are skipped: they are far from the optimum."""
    num_eval_windows: int = 2048
    """Held-out windows that score all models."""

    @property
    def sweep(self) -> SweepConfig:
        """The grid of the runs; raises `ValueError` if it is invalid."""
        return make_sweep(vars(self))


def make_sweep(fields: Mapping[str, Any]) -> SweepConfig:
    """Returns the grid of a config of this family.

    Args:
      fields: fields of the config by name: `widths`, `num_layers`, `seq_len`, and those
        of `SweepConfig`; further fields are ignored.

    Raises:
      ValueError: the grid is invalid.
    """
    names = {x.name for x in dataclasses.fields(SweepConfig)}
    sweep_fields = {name: value for name, value in fields.items() if name in names}
    sizes = fields["num_layers"], fields["seq_len"]
    models = tuple(family_shape(width, *sizes) for width in fields["widths"])
    return SweepConfig(models=models, base_width=BASE_WIDTH, **sweep_fields)


ISOFLOP = {
    "cpu": FamilySweep(
        widths=(6, 8, 12, 16, 24, 32, 48, 64, 96),
        budgets=(2.5e10, 6.25e10, 1.5625e11, 3.90625e11),
        # Seeds 0 to 4 were used while the rules were developed on held-out runs; these
        # runs are new.
        seeds=(5, 6),
        num_repeated=9,
    ),
    # Commands of under ten minutes each, which continue one another.
    "gpu": FamilySweep(
        widths=(24, 32, 48, 64, 96, 128, 192, 256),
        budgets=(1e13, 3e13, 1e14, 3e14),
        num_layers=4,
        batch_size=32,
        seq_len=256,
        warmup_steps=100,
        num_eval_windows=1024,
    ),
}
"""Sweeps that `jaxkv run isoflop` fits."""

SWEEPS = {
    "smoke": SweepConfig(
        models=tuple(family_shape(width, 1, 32) for width in (4, 8, 16)),
        corpus=CorpusConfig(held_out=0.02),
        num_tokens=(2560, 5120, 10240),
        learning_rates=(1e-2, 3e-2),
        max_extensions=0,
        seq_len=32,
        warmup_steps=5,
        min_steps=1,
        num_eval_windows=32,
        mode="loop",
    ),
    # Sizes by tokens: half a minute.
    "grid": SweepConfig(
        models=tuple(family_shape(width, 2, 64) for width in (8, 12, 16, 24)),
        num_tokens=(2**17, 2**18, 2**19, 2**20),
        learning_rates=(4e-3, 8e-3, 1.6e-2),
    ),
    **{f"isoflop_{name}": preset.sweep for name, preset in ISOFLOP.items()},
}
"""Sweeps of `jaxkv sweep` by name."""

TRAININGS = {
    "smoke": TrainConfig(
        model=family_shape(8, 1, 32),
        corpus=CorpusConfig(held_out=0.02),
        optimizer=ADAMW,
        batch_size=8,
        seq_len=32,
        num_steps=40,
        warmup_steps=5,
        cooldown_steps=10,
        learning_rate=3e-2,
        report_every=10,
        checkpoint_every=20,
    ),
    # A minute on two cores; the model's samples resemble Python.
    "small": TrainConfig(
        model=dataclasses.replace(family_shape(64, 2, 256), max_positions=1024),
        optimizer=OptimizerConfig(kind="muon"),
        batch_size=8,
        seq_len=128,
        num_steps=1500,
        warmup_steps=50,
        cooldown_steps=500,
        learning_rate=1e-2,
        report_every=25,
        checkpoint_every=250,
    ),
}
"""Configs of `jaxkv train` by name."""
