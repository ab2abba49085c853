"""Steps of training: pure, many of them one compiled program.

The program is compiled once for a model, an optimizer and the sizes of a batch. What a
sweep varies, the learning rate, the schedule, the seed, the number of steps, are
arrays.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Int32, UInt

from jaxkv.models import transformer
from scaling.corpora import corpora
from scaling.costs.parallelism import Layout
from scaling.training import (
    architectures,
    meshes,
    objectives,
    optimizers,
    parallel,
)
from scaling.training.recipes import (
    PLAIN,
    LearningRateSchedule,
    OptimizerConfig,
    StepConfig,
)


class TrainState(NamedTuple):
    """All that a run carries from step to step.

    Attributes:
      params: the model's parameters, float32.
      moments: what the optimizer remembers.
      step: how many steps have been taken.
    """

    params: transformer.Params
    moments: Any
    step: Int32[Array, ""]


def init_train_state(
    model: architectures.Architecture, optimizer: OptimizerConfig, seed: Int[Array, ""]
) -> TrainState:
    """Makes the state before the first step."""
    params = architectures.init_model_params(model, jax.random.key(seed))
    return TrainState(
        params, optimizers.make_optimizer(optimizer).init(params), jnp.int32(0)
    )


@functools.cache
def compiled_steps(
    model: architectures.Architecture,
    optimizer: OptimizerConfig,
    batch_size: int,
    seq_len: int,
    how: StepConfig = PLAIN,
    objective: objectives.Objective = objectives.NEXT_TOKEN,
) -> Any:
    """Makes the program of some steps, the same one whenever the arguments are equal.

    Args:
      model: shape of the model.
      optimizer: as the state was made for.
      batch_size: windows per step.
      seq_len: predictions per window.
      how: what to keep, in which type, on which devices.
      objective: what is minimised.

    Returns:
      A function of a state, as `divide_train_state` divides it if `how` has a layout;
      of the tokens
      to learn, such as `Corpus.stream`; of the schedule of the learning rate; of the
      seed of the order of the text; and of the number of steps, at least 1. It returns
      the new state, and the mean loss of the steps in nats per token. However a run is
      divided into calls, its states are the same.
    """
    update = optimizers.make_optimizer(optimizer).update

    def steps(
        state: TrainState,
        stream: UInt[Array, " tokens"],
        schedule: LearningRateSchedule,
        seed: Int[Array, ""],
        num_steps: Int[Array, ""],
    ) -> tuple[TrainState, Float[Array, ""]]:
        how.check(batch_size)
        objective.check(seq_len, how.layout)
        gradient = parallel.divided_gradient(model, how, objective)

        def step(_, carry):
            (params, moments, step), total = carry
            windows = corpora.draw_windows(
                stream,
                seed,
                step,
                batch_size=batch_size,
                seq_len=seq_len,
                aligned=objective.of_records,
            )
            loss, grads = gradient(params, windows)
            updates, moments = update(grads, moments, params)
            rate = schedule.at(step)
            params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
            state = TrainState(params, moments, step + 1)
            return _kept_divided(state, model, how.layout), total + loss

        state, total = jax.lax.fori_loop(0, num_steps, step, (state, jnp.float32(0)))
        return state, total / num_steps.astype(jnp.float32)

    return jax.jit(steps)


def divide_train_state(
    state: TrainState, model: architectures.Architecture, layout: Layout
) -> TrainState:
    """Divides a state over the devices of a layout, ready for `steps`."""
    whole = dataclasses.replace(layout, zero=0)
    return TrainState(
        params=meshes.place_tree(model, whole, state.params),
        moments=meshes.place_tree(model, layout, state.moments),
        step=meshes.place_tree(model, whole, state.step),
    )


def _kept_divided(
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
