"""Training of the bundled model on a small scale: from text to a loadable folder."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.training.bundled_model import experiment
from jaxkv import files
from jaxkv.models import load_model, read_config
from scaling.corpora import END_TOKEN, load_documents
from scaling.training import NEXT_TOKEN, MultiTokenPrediction, score_documents
from tests.support import smoke
from tests.support.impatience import Stopping


@pytest.mark.thorough
def test_smoke_trains_scores_and_exports() -> None:
    smoke_run = smoke.run("bundled_model")
    config = smoke_run.config
    result = smoke_run.result
    assert result.status == "done"
    assert result.tokens[-1] == 40 * 8 * 32 + 10 * 4 * 64
    assert (np.diff(result.tokens) > 0).all()
    assert result.loss[-1] < 2.5
    # The number on the card is that of the weights in the folder.
    loaded = load_model(config.export)
    assert loaded.config == config.trunk.model
    assert loaded.eos_ids == (END_TOKEN,)
    split = load_documents(config.trunk.corpus)
    score = score_documents(
        loaded.params, split.held_out, model=loaded.config, seq_len=64
    )
    assert score.bits_per_byte == pytest.approx(result.bits_per_byte, rel=1e-6)
    card = (Path(config.export) / "README.md").read_text()
    assert f"{score.bits_per_byte:.4f}" in card
    assert max(map(len, card.splitlines())) < 120
    for x in jax.tree.leaves(loaded.params):
        assert (x == x.astype(jnp.bfloat16).astype(x.dtype)).all()
    # The same command finds the finished run.
    again = experiment.run(config)
    assert again.bits_per_byte == result.bits_per_byte
    assert smoke_run.metrics["held_out_bits_per_byte"] == result.bits_per_byte
    assert load_experiment("bundled-model").name == "bundled_model"


def test_a_stopped_run_exports_nothing(tmp_path: Path) -> None:
    config = dataclasses.replace(
        experiment.CONFIGS["smoke"], export=str(tmp_path / "model")
    )
    result = experiment.run(config, Stopping(0))
    assert result.status == "stopped"
    assert math.isnan(result.bits_per_byte)
    assert len(result.tokens) == 0
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["shipped", "deepseek"])
def test_the_shipped_models_fit_their_limits(name: str) -> None:
    config = experiment.CONFIGS[name]
    assert config.cooldown.seq_len == 512
    folder = files.BUNDLED / Path(config.export).name
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 4e6
    assert read_config(folder) == config.trunk.model


def test_modules_are_trained_with_their_objective() -> None:
    objective = experiment.CONFIGS["deepseek"].objective
    assert objective == MultiTokenPrediction(weight=0.3)
    assert experiment.CONFIGS["shipped"].objective == NEXT_TOKEN


def test_a_cooldown_is_needed() -> None:
    config = experiment.CONFIGS["smoke"]
    with pytest.raises(ValueError, match="cooldown_steps=0 must be at least 1"):
        dataclasses.replace(config, cooldown_steps=0)
    trunk = dataclasses.replace(config.trunk, cooldown_steps=1)
    with pytest.raises(ValueError, match=r"trunk\.cooldown_steps=1 must be 0"):
        dataclasses.replace(config, trunk=trunk)
