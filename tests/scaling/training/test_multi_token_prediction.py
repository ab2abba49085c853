"""Multi-token prediction as a training objective, against NumPy in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import Experts, ModelConfig, param_shapes
from scaling.costs import Layout
from scaling.training import (
    TrainingObjective,
    divided_gradient,
    gather_tree,
    place_training_tree,
    transformer_rows,
)
from scaling.training.objectives import MultiTokenPrediction
from scaling.training.recipes import StepConfig
from tests.support import ahead_reference
from tests.support.engines import MODEL

AHEAD = dataclasses.replace(MODEL, num_ahead_layers=2)
WINDOWS: np.ndarray = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 8))
MIXTURE: Any = {"num_experts": 4, "top_k": 2, "size": 8}
OBJECTIVE = MultiTokenPrediction(weight=0.3)


@functools.cache
def params_of(config: ModelConfig) -> Any:
    """Parameters that all affect the logits, norms included."""
    rng = np.random.default_rng(1)
    shapes = param_shapes(config)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0.2, 0.4, x.shape), x.dtype), shapes
    )


def loss_of(params: Any, config: ModelConfig, windows: Any = WINDOWS) -> Any:
    windows = jnp.asarray(windows, jnp.int32)
    return OBJECTIVE(
        params, windows[:, :-1], windows[:, 1:], model=config, layout=Layout()
    )


def test_logits_and_loss_equal_the_reference() -> None:
    config = AHEAD
    params = params_of(config)
    how: dict[str, Any] = {"config": config, "num_ahead": 2}
    run = functools.partial(transformer_rows.run_with_ahead, **how)
    outputs = jax.jit(run)(params, jnp.asarray(WINDOWS[:, :-1], jnp.int32))
    sums = np.zeros(3)
    seq = WINDOWS.shape[1] - 1
    for index, window in enumerate(WINDOWS):
        tokens = window[:-1]
        targets = window[1:]
        wanted = ahead_reference.reference_logits(params, tokens, config)
        for depth, logits in enumerate(wanted):
            depth_logits = outputs[depth].logits[index]
            np.testing.assert_allclose(depth_logits, logits, rtol=1e-4, atol=1e-4)
            # Equation 24: module k predicts from token k on, over all tokens.
            for place in range(depth, seq):
                law = logits[place] - logits[place].max()
                law = law - np.log(np.exp(law).sum())
                sums[depth] -= law[targets[place]] / seq / len(WINDOWS)
    loss, report = jax.jit(loss_of, static_argnums=1)(params, config)
    np.testing.assert_allclose(report, sums[0], rtol=1e-5)
    np.testing.assert_allclose(loss, sums[0] + 0.3 * sums[1:].mean(), rtol=1e-5)


@pytest.mark.thorough
def test_every_parameter_learns() -> None:
    grads = jax.jit(jax.grad(lambda p: loss_of(p, AHEAD)[0]))(params_of(AHEAD))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(grad).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_losses_of_mixtures_in_modules_count() -> None:
    """Twice the balance weight adds the model's term and the modules' term again."""
    mixture = Experts(**MIXTURE, num_dense_layers=1)
    config = dataclasses.replace(AHEAD, experts=mixture)
    params = params_of(config)
    tokens = jnp.asarray(WINDOWS[:, :-1], jnp.int32)

    def terms(weight: float) -> np.ndarray:
        experts = dataclasses.replace(mixture, balance_weight=weight)
        changed = dataclasses.replace(config, experts=experts)
        how: dict[str, Any] = {"config": changed, "num_ahead": 2}
        outputs = transformer_rows.run_with_ahead(params, tokens, **how)
        sums = [float(x.auxiliary) for x in outputs]
        loss = float(loss_of(params, changed)[0])
        return np.array([*sums, loss])

    once = terms(0.1)
    twice = terms(0.2)
    assert (once[:3] > 0).all()
    np.testing.assert_allclose(twice[:3], 2 * once[:3], rtol=1e-5)
    np.testing.assert_allclose(twice[3] - once[3], once[:3].sum(), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"experts": Experts(**MIXTURE)}])
def test_a_mesh_gives_the_gradient_of_one_device(fields: Any) -> None:
    config = dataclasses.replace(AHEAD, **fields)
    layout = Layout(data=2, expert=2, gather=True) if fields else Layout(tensor=2)
    params = params_of(config)
    windows = jnp.asarray(WINDOWS, jnp.int32)
    placed = place_training_tree(config, layout, params)
    step_outputs = []
    for how, step_params in (
        (StepConfig(), params),
        (StepConfig(layout=layout), placed),
    ):
        run = jax.jit(divided_gradient(config, how, OBJECTIVE))
        step_outputs.append(run(step_params, windows))
    (loss, wanted), (divided, grads) = step_outputs
    np.testing.assert_allclose(divided, loss, rtol=1e-5)
    grads = gather_tree(config, layout, grads)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * np.abs(y).max())


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (Layout(ring=2), "ring=2 must be 1 for multi-token prediction"),
        (Layout(ulysses=2), "ulysses=2 must be 1 for multi-token prediction"),
        (Layout(pipeline=2), "pipeline=2 must be 1 for multi-token prediction"),
        (Layout(tensor=2, sequence=True), "sequence=True must be False"),
    ],
)
def test_layouts_that_divide_rows_or_layers_are_refused(
    layout: Layout, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        OBJECTIVE.check(8, layout)
    OBJECTIVE.check(8, Layout(data=2, tensor=2))


def test_models_without_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ahead_layers=0 must be at least 1"):
        loss_of(params_of(MODEL), MODEL)
    with pytest.raises(ValueError, match="weight=-1"):
        MultiTokenPrediction(weight=-1.0)
    assert isinstance(OBJECTIVE, TrainingObjective)
