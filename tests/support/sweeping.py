"""A small sweep: two widths, two lengths, two rates."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxkv.models import ModelConfig
from scaling.corpora import CorpusConfig
from scaling.sweeps import SweepConfig
from tests.support import texts
from tests.support.shapes import SMALL


def model(width: int) -> ModelConfig:
    return dataclasses.replace(
        SMALL, hidden_size=width, num_q_heads=1, mlp_size=16, max_positions=16
    )


def config(folder: Path, **changes: Any) -> SweepConfig:
    """Returns a config of the sweep over a text in a folder, with some changes."""
    pattern = texts.write_functions(folder / "text")
    settings: dict[str, Any] = {
        "num_tokens": (32 * 20, 32 * 40),
        "max_extensions": 1,
    }
    return SweepConfig(
        models=(model(8), model(16)),
        corpus=CorpusConfig(pattern=pattern, held_out=0.2),
        learning_rates=(1e-2, 2e-2),
        base_width=8,
        batch_size=2,
        seq_len=16,
        warmup_steps=4,
        min_steps=1,
        num_eval_windows=8,
        mode="loop",
        **settings | changes,
    )
