"""Maximal update parametrization, and the check of its coordinates."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import ModelConfig, read_config, save_model
from scaling import training
from scaling.sweeps import (
    MAX_SLOPE,
    SweepConfig,
    measure_coordinates,
    open_on_device,
    widen_model,
)
from scaling.sweeps.grid import Cell, Lane, train_config
from scaling.training import (
    OptimizerConfig,
    TrainConfig,
    init_train_state,
    layer_activity,
    make_optimizer,
    run_folder,
)
from scaling.training.run_folder import PARAMETRIZATION
from tests.support import sweeping
from tests.support.refusals import refused
from tests.support.sweeping import model


@pytest.fixture
def config(tmp_path) -> SweepConfig:
    sweep = sweeping.config(tmp_path)
    return dataclasses.replace(
        sweep, batch_size=8, rate_exponent=0.0, parametrization="mup", min_steps=1
    )


@pytest.fixture
def run(config: SweepConfig) -> TrainConfig:
    return train_config(config, Cell(model(16), 20), Lane(1e-2, 0))


def test_matrices_of_layers_have_scaled_updates_and_variance(run) -> None:
    assert run.hidden_rate == 0.5
    arguments = (run.model, run.optimizer, jnp.int32(0))
    scaled = init_train_state(*arguments, run.hidden_rate).params
    params = init_train_state(*arguments).params
    grads = jax.tree.map(jnp.ones_like, params)
    decay = run.optimizer.weight_decay

    def update(hidden_rate: float):
        optimizer = make_optimizer(run.optimizer, hidden_rate)
        moments = optimizer.init(params)
        return jax.jit(optimizer.update)(grads, moments, params)[0]

    trees = (params, scaled, update(1.0), update(run.hidden_rate))
    num_matrices = 0
    for (path, x), y, u, v in zip(
        jax.tree.leaves_with_path(trees[0]),
        *map(jax.tree.leaves, trees[1:]),
        strict=True,
    ):
        if path[0].key == "layers" and path[-1].key == "weight":
            num_matrices += 1
            np.testing.assert_allclose(y, np.sqrt(0.5) * x, rtol=1e-6)
            adam = -np.asarray(u) - decay * np.asarray(x)
            slow = -(0.5 * adam + decay * np.asarray(x))
            np.testing.assert_allclose(v, slow, rtol=1e-5, atol=1e-7)
        else:
            np.testing.assert_array_equal(y, x)
            np.testing.assert_array_equal(v, u)
    assert num_matrices >= 4


def test_logits_are_divided_by_the_widening(run, tmp_path) -> None:
    assert isinstance(run.model, ModelConfig)
    scores = dataclasses.replace(run.model, attention_scale=1 / run.model.head_dim)
    params = init_train_state(run.model, run.optimizer, jnp.int32(0)).params
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
    activity = layer_activity(params, tokens, config=run.scaled_model)
    plain = training.architectures.forward(params, tokens, config=scores).logits
    np.testing.assert_allclose(
        activity.logits, 0.5 * plain.reshape(24, -1), rtol=1e-5, atol=1e-7
    )
    assert len(activity.residual) == 1 + run.model.num_layers
    save_model(tmp_path / "model", run.scaled_model, params, tokenizer=None)
    saved = read_config(tmp_path / "model")
    assert saved.logit_scale == run.scaled_model.logit_scale == 0.5
    assert saved.attention_scale == scores.attention_scale


def test_a_run_of_an_earlier_config_continues(run) -> None:
    standard = dataclasses.replace(run, parametrization="standard", schedule="stable")
    described = json.loads(json.dumps(dataclasses.asdict(standard)))
    assert described["schedule"] == "wsd"
    earlier = {k: v for k, v in described.items() if k not in PARAMETRIZATION}
    earlier["schedule"] = "stable"
    same = run_folder._deciding
    assert run_folder._differences(same(earlier), same(described)) == []
    scaled = json.loads(json.dumps(dataclasses.asdict(run)))
    names = run_folder._differences(same(earlier), same(scaled))
    assert names == [*sorted(PARAMETRIZATION)] == ["base_width", "parametrization"]


def test_models_are_widened_by_heads(config) -> None:
    base = dataclasses.replace(
        model(48), num_q_heads=6, num_kv_heads=2, head_dim=8, mlp_size=96
    )
    shapes = widen_model(base)
    assert [x.hidden_size for x in shapes] == [48, 96, 192, 384]
    for shape in shapes:
        assert shape.head_dim == 8
        assert shape.num_q_heads * 8 == shape.hidden_size == shape.mlp_size // 2
        assert shape.group_size == 3
    assert [x.hidden_size for x in widen_model(model(8))] == [32, 64, 128, 256]


@pytest.mark.slow
def test_mup_passes_and_standard_grows(config) -> None:
    corpus = open_on_device(config.corpus)
    models = [
        dataclasses.replace(
            model(width),
            num_q_heads=width // 16,
            num_kv_heads=width // 16,
            head_dim=16,
            mlp_size=2 * width,
        )
        for width in (32, 256)
    ]
    sweep = dataclasses.replace(config, base_width=32)
    mup, standard = (
        measure_coordinates(sweep, corpus, name, models=models)
        for name in ("mup", "standard")
    )
    assert mup.places == ("embedding", *mup.places[1:-1], "logits")
    assert mup.passes
    assert not standard.passes
    # The smallest model differs by its scores alone.
    np.testing.assert_allclose(mup.change[0], standard.change[0], rtol=0.1)
    assert standard.slopes[1:].min() > 4 * MAX_SLOPE
    slow = np.log(mup.change[1] / mup.change[0]) / np.log(8)
    np.testing.assert_allclose(mup.slopes, slow, atol=1e-6)


def test_undefined_uses_of_mup_are_refused(config, run) -> None:
    with refused("needs optimizer.kind='adamw', not 'muon'"):
        dataclasses.replace(run, optimizer=OptimizerConfig())
    with refused("needs a dense transformer of family llama or granite"):
        dataclasses.replace(
            run,
            model=training.RecurrentConfig(
                vocab_size=257, hidden_size=8, num_layers=1, max_positions=16
            ),
        )
    with refused("run.parametrization='mup' must be 'standard'"):
        training.HeadRecipe(run=run)
    with refused("rate_exponent=1 must be 0 with parametrization='mup'"):
        dataclasses.replace(config, rate_exponent=1.0)
