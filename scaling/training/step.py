"""Training steps as a pure function, many of them in one compiled program.

The program is compiled once for a model, an optimizer and a batch shape. The variables
of a sweep (learning rate, schedule, seed, number of steps) are arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Int32, PyTree, UInt

from jaxkv import validation
from jaxkv.models import ModelConfig, Params, is_selection_bias
from scaling.corpora import draw_windows
from scaling.costs import Layout
from scaling.training import (
    architectures,
    meshes,
    objectives,
    optimizers,
    parallel,
)
from scaling.training.recipes import (
    PLAIN_STEP,
    LearningRateSchedule,
    OptimizerConfig,
    StepConfig,
)

MIN_ONEDNN_WIDTH = 64
"""Hidden size from which on oneDNN has all products of a step on a CPU."""


class TrainState(NamedTuple):
    """State of a run between steps.

    Attributes:
      params: the model's parameters, float32.
      moments: state of the optimizer.
      step: number of steps so far.
    """

    params: Params
    moments: PyTree[Array]
    step: Int32[Array, ""]


class TrainStepInfo(NamedTuple):
    """Means over training steps, for logs.

    Attributes:
      loss: nats per token, or the reported loss of another objective.
      loads: fraction of the tokens that chose each expert, by mixture from the first
        layer on; None for models without selection biases.
    """

    loss: Float[Array, ""]
    loads: Float[Array, "mixtures experts"] | None


@validation.checks_numbers(hidden_rate="(0, 1e30]")
def init_train_state(
    model: architectures.Architecture,
    optimizer: OptimizerConfig,
    seed: Int[Array, ""],
    hidden_rate: float = 1.0,
) -> TrainState:
    """Returns the state before the first step.

    The layers' matrices have `hidden_rate` times their usual initial variance.
    """
    params = architectures.init_model_params(model, jax.random.key(seed))
    if hidden_rate != 1:
        scale = jnp.float32(hidden_rate**0.5)
        params = jax.tree.map_with_path(
            lambda path, p: p * scale if optimizers.is_layer_matrix(path, p) else p,
            params,
        )
    moments = optimizers.make_optimizer(optimizer, hidden_rate).init(params)
    return TrainState(params, moments, jnp.int32(0))


@validation.checks_numbers()
@functools.cache
def compiled_steps(
    model: architectures.Architecture,
    optimizer: OptimizerConfig,
    batch_size: int,
    seq_len: int,
    how: StepConfig = PLAIN_STEP,
    objective: objectives.TrainingObjective = objectives.NEXT_TOKEN,
    hidden_rate: float = 1.0,
) -> Any:
    """Returns the compiled program of training steps, cached by its arguments.

    Args:
      model: config of the model.
      optimizer: optimizer of the state.
      batch_size: windows per step.
      seq_len: predictions per window.
      how: dtype, rematerialization and layout of a step.
      objective: the training objective.
      hidden_rate: see `optimizers.make_optimizer`.

    Returns:
      A function of a state (divided by `divide_train_state` if `how` has a layout), of
      the training tokens such as `Corpus.stream`, of the learning rate schedule, of the
      seed of the order of windows, and of the number of steps, at least 1. It returns
      the new state, and the mean information of the steps. The states of a run do not
      depend on its division into calls.
    """
    update = optimizers.make_optimizer(optimizer, hidden_rate).update
    experts = model.experts if isinstance(model, ModelConfig) else None
    bias_rate = experts.bias_rate if experts else 0.0

    def steps(
        state: TrainState,
        stream: UInt[Array, " tokens"],
        schedule: LearningRateSchedule,
        seed: Int[Array, ""],
        num_steps: Int[Array, ""],
    ) -> tuple[TrainState, TrainStepInfo]:
        how.check(batch_size)
        objective.check(seq_len, how.layout)
        gradient = parallel.divided_gradient(model, how, objective)

        def step(_, carry):
            (params, moments, step), total = carry
            windows = draw_windows(
                stream,
                seed,
                step,
                batch_size=batch_size,
                seq_len=seq_len,
                aligned=objective.of_records,
            )
            loss, grads = gradient(params, windows)
            updates, moments = update(_without_loads(grads), moments, params)
            rate = schedule.at(step)
            params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
            if bias_rate:
                params = balance_experts(params, grads, bias_rate)
            state = TrainState(params, moments, step + 1)
            info = TrainStepInfo(loss, _expert_loads(grads))
            state = _constrain_sharding(state, model, how.layout)
            return state, jax.tree.map(jnp.add, total, info)

        zero = TrainStepInfo(jnp.float32(0), _expert_loads(state.params))
        carry = state, jax.tree.map(jnp.zeros_like, zero)
        state, total = jax.lax.fori_loop(0, num_steps, step, carry)
        return state, jax.tree.map(lambda x: x / num_steps.astype(x.dtype), total)

    return jax.jit(steps, compiler_options=_compiler_options(model))


def _compiler_options(model: architectures.Architecture) -> dict[str, bool | str]:
    """Returns XLA flags for steps on a CPU; other platforms ignore them.

    By default YNNPACK has the products, except for gradients of weights, which take 1.3
    to 1.6 times the time of oneDNN's. OneDNN also adds biases and residuals while it
    multiplies, and reads transposed operands in place. Small products start faster in
    YNNPACK, and so do sums of any size.
    """
    options: dict[str, bool | str] = {"xla_cpu_experimental_onednn_custom_call": True}
    if model.hidden_size >= MIN_ONEDNN_WIDTH:
        sums_only = "LIBRARY_FUSION_TYPE_REDUCE"
        options["xla_cpu_experimental_ynn_fusion_type"] = sums_only
    return options


def balance_experts(params: Params, grads: Params, rate: float) -> Params:
    """Moves selection biases towards equal loads, without an auxiliary loss.

    Args:
      params: parameters of a model.
      grads: result of `parallel.divided_gradient`, in which the gradient of a selection
        bias is the load of its experts over the rows of all devices.
      rate: change of a bias: up for an expert with less than the mean load, down for
        one with more.

    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """

    def one(path: Sequence[object], param: Array, load: Array) -> Array:
        if not is_selection_bias(path):
            return param
        missing = jnp.mean(load, axis=-1, keepdims=True) - load
        return param + jnp.asarray(rate, param.dtype) * jnp.sign(missing)

    return jax.tree_util.tree_map_with_path(one, params, grads)


def _without_loads(grads: Params) -> Params:
    """Returns gradients in which those of selection biases are zero."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if is_selection_bias(path) else x,
        grads,
    )


def _expert_loads(grads: Params) -> Float[Array, "mixtures experts"] | None:
    """Returns the gradients of the layers' selection biases."""
    loads = [
        x.reshape(-1, x.shape[-1])
        for path, x in jax.tree_util.tree_leaves_with_path(grads.get("layers", {}))
        if is_selection_bias(path)
    ]
    return jnp.concatenate(loads) if loads else None


def divide_train_state(
    state: TrainState, model: architectures.Architecture, layout: Layout
) -> TrainState:
    """Divides a state over the devices of a layout, for `compiled_steps`."""
    param_layout = dataclasses.replace(layout, zero=0)
    return TrainState(
        params=meshes.place_training_tree(model, param_layout, state.params),
        moments=meshes.place_training_tree(model, layout, state.moments),
        step=meshes.place_training_tree(model, param_layout, state.step),
    )


def _constrain_sharding(
    state: TrainState, model: architectures.Architecture, layout: Layout
) -> TrainState:
    """Constrains a state to the sharding of `divide_train_state`."""
    if layout.num_devices == 1:
        return state
    mesh = meshes.make_training_mesh(layout)
    specs = TrainState(
        *(
            meshes.tree_specs(model, how, mesh, tree)
            for how, tree in zip(
                (dataclasses.replace(layout, zero=0), layout, layout),
                state,
                strict=True,
            )
        )
    )
    return jax.tree.map(
        lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)),
        state,
        specs,
    )
