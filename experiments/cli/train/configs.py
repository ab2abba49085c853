"""The configs that ship for `jaxkv sweep` and `jaxkv train`, and those in files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from experiments.framework import config_json
from experiments.training.isoflop import experiment, settings
from scaling.corpora import corpora
from scaling.sweeps import ADAMW, SweepConfig
from scaling.training import OptimizerConfig, TrainConfig

SWEEPS = {
    "smoke": SweepConfig(
        models=tuple(settings.shape(width, 1, 32) for width in (4, 8, 16)),
        corpus=corpora.CorpusConfig(held_out=0.02),
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
        models=tuple(settings.shape(width, 2, 64) for width in (8, 12, 16, 24)),
        num_tokens=(2**17, 2**18, 2**19, 2**20),
        learning_rates=(4e-3, 8e-3, 1.6e-2),
    ),
    # Those that `jaxkv run isoflop` fits.
    **{
        f"isoflop_{name}": dataclasses.replace(
            experiment.CONFIGS[name].sweep, keep_models=False
        )
        for name in ("cpu", "gpu")
    },
}

TRAININGS = {
    "smoke": TrainConfig(
        model=settings.shape(8, 1, 32),
        corpus=corpora.CorpusConfig(held_out=0.02),
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
    # A minute on two cores; a model that writes lines that look like Python.
    "small": TrainConfig(
        model=dataclasses.replace(settings.shape(64, 2, 256), max_positions=1024),
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


def find[T](name: str, config_type: type[T], shipped: Mapping[str, T]) -> T:
    """Reads a config.

    Args:
      name: one that ships, or the path of a JSON file, as `--print-config` writes it.
      config_type: its type.
      shipped: those that ship.

    Raises:
      ValueError: there is neither, or the file holds something else.
    """
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        line = config_json.unknown("config", name, shipped)
        raise ValueError(f"{line}, or the path of a JSON file")
    return config_json.config_loads(config_type, config_json.read_text(path), name)
