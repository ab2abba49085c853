"""Parameters of modules for multi-token prediction, in every form of the tree."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import (
    ModelConfig,
    init_params,
    param_axes,
    param_forms,
    param_shapes,
    save_model,
)
from jaxkv.models.config import Experts
from tests.support.engines import MODEL
from tests.support.trees import assert_same

AHEAD = dataclasses.replace(MODEL, num_ahead_layers=2)
MIXED = dataclasses.replace(
    AHEAD, experts=Experts(num_experts=4, top_k=2, size=8, num_dense_layers=1)
)
TOKENS = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], jnp.int32)
NAMES = {"token_norm", "feature_norm", "merge", "layer", "final_norm"}


@functools.cache
def params_of(config: ModelConfig) -> Any:
    return init_params(config, jax.random.key(0))


def test_the_tree_has_a_module_for_each_layer_ahead() -> None:
    for config in (AHEAD, MIXED):
        params = param_shapes(config)
        assert {*params["ahead"]} == {0, 1}
        for module in params["ahead"].values():
            assert {*module} == NAMES
            last = params["layers"][1]
            assert jax.tree.structure(module["layer"]) == jax.tree.structure(last)
            assert module["merge"]["weight"].shape == (24, 48)
    assert "ahead" not in param_shapes(MODEL)
    axes = param_axes(AHEAD, stacked=True)
    assert axes["ahead"][0]["merge"]["weight"] == ("hidden", None)
    # Layers of modules are not stacked.
    assert axes["ahead"][1]["layer"]["down"]["weight"] == ("hidden", "mlp")
    assert axes["layers"][0]["down"]["weight"] == ("layers", "hidden", "mlp")


def test_the_model_is_the_one_without_modules() -> None:
    """Initial values, program and logits."""
    params = params_of(AHEAD)
    plain = params_of(MODEL)
    assert_same({**params, "ahead": None}, {**plain, "ahead": None})
    run = jax.jit(models.logits, static_argnames="config")
    texts = [
        run.lower(tree, TOKENS, config=config).as_text()
        for tree, config in ((params, AHEAD), (plain, MODEL))
    ]
    assert texts[0] == texts[1]


def test_forms_of_parameters_keep_the_modules() -> None:
    params = params_of(MIXED)
    stacked = param_forms.stack_layers(MIXED, params)
    assert jax.tree.structure(stacked) == jax.tree.structure(
        param_shapes(MIXED, stacked=True)
    )
    assert_same(param_forms.unstack_layers(MIXED, stacked), params)
    params = params_of(AHEAD)
    both = param_forms.add_transposed_weights(params)
    weight = params["ahead"][1]["layer"]["down"]["weight"]
    stored_weight = both["ahead"][1]["layer"]["down"]["transposed"]
    np.testing.assert_array_equal(stored_weight, weight.T)
    assert_same(param_forms.drop_transposed_weights(both), params)


def test_families_without_a_place_for_modules_are_refused(tmp_path: Path) -> None:
    line = "num_ahead_layers=2 has no place in the config.json of family='llama'"
    with pytest.raises(ValueError, match=line):
        save_model(tmp_path / "model", AHEAD, params_of(AHEAD))
    assert not (tmp_path / "model").exists()
