"""Steps of training: pure, many of them one compiled program.

The program is compiled once for a model, an optimizer and the sizes of a batch. What a
sweep varies, the learning rate, the schedule, the seed, the number of steps, are
arrays.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int32, UInt

from jaxkv.models import transformer
from scaling.corpora import corpora
from scaling.training import architectures, objectives, optimizers
from scaling.training.recipes import PLAIN, OptimizerConfig, Schedule, StepConfig


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


def init(
    model: architectures.Architecture, optimizer: OptimizerConfig, seed: Int[Array, ""]
) -> TrainState:
    """Makes the state before the first step."""
    params = architectures.init_params(model, jax.random.key(seed))
    return TrainState(params, optimizers.make(optimizer).init(params), jnp.int32(0))


def steps(
    state: TrainState,
    stream: UInt[Array, " tokens"],
    schedule: Schedule,
    seed: Int[Array, ""],
    num_steps: Int[Array, ""],
    *,
    model: architectures.Architecture,
    optimizer: OptimizerConfig,
    batch_size: int,
    seq_len: int,
    how: StepConfig = PLAIN,
) -> tuple[TrainState, Float[Array, ""]]:
    """Takes some steps of training.

    Args:
      state: where the run stands.
      stream: the tokens to learn, such as `Corpus.stream`.
      schedule: of the learning rate.
      seed: of the order of the text.
      num_steps: how many steps, at least 1.
      model: shape of the model.
      optimizer: as the state was made for.
      batch_size: windows per step.
      seq_len: predictions per window.
      how: what to keep, in which type, on how many devices.

    Returns:
      The new state; and the mean loss of the steps, in nats per token. However a run
      is divided into calls, its states are the same.
    """
    how.check(batch_size)
    update = optimizers.make(optimizer).update
    gradient = _gradient(model, how)

    def step(_, carry):
        (params, moments, step), total = carry
        windows = corpora.draw(
            stream, seed, step, batch_size=batch_size, seq_len=seq_len
        )
        loss, grads = gradient(params, windows)
        updates, moments = update(grads, moments, params)
        rate = schedule.at(step)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return TrainState(params, moments, step + 1), total + loss

    state, total = jax.lax.fori_loop(0, num_steps, step, (state, jnp.float32(0)))
    return state, total / num_steps.astype(jnp.float32)


@functools.cache
def compiled(
    model: architectures.Architecture,
    optimizer: OptimizerConfig,
    batch_size: int,
    seq_len: int,
    how: StepConfig = PLAIN,
) -> Any:
    """Gives `steps` as a program, the same one whenever the arguments are equal."""
    return jax.jit(
        functools.partial(
            steps,
            model=model,
            optimizer=optimizer,
            batch_size=batch_size,
            seq_len=seq_len,
            how=how,
        )
    )


type _Gradient = Callable[[Any, Array], tuple[Array, Any]]


def _gradient(model: architectures.Architecture, how: StepConfig) -> _Gradient:
    """What gives the mean loss of windows, and its gradient in float32."""

    def plain(params, windows):
        if how.dtype != "float32":
            params = jax.tree.map(lambda p: p.astype(how.dtype), params)
        return objectives.mean_loss(params, windows, model=model)

    # What is cheap beside the products can be computed again.
    policy = jax.checkpoint_policies.dots_saveable
    loss = jax.checkpoint(plain, policy=policy) if how.remat else plain
    of_piece = jax.value_and_grad(loss, has_aux=True)

    def of_shard(params, windows):
        if how.accumulation == 1:
            (_, nats), grads = of_piece(params, windows)
            return nats, grads
        pieces = windows.reshape(how.accumulation, -1, windows.shape[1])

        def add(total, piece):
            (_, nats), grads = of_piece(params, piece)
            return jax.tree.map(jnp.add, total, (nats, grads)), None

        zero = jnp.float32(0)
        if how.num_devices > 1:  # each device's own sum, as its copy of `params` is
            zero = jax.lax.pcast(zero, "data", to="varying")
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, (zero, zeros), pieces)
        return jax.tree.map(lambda x: x / np.float32(how.accumulation), total)

    if how.num_devices == 1:
        return of_shard
    devices = np.asarray(jax.local_devices()[: how.num_devices])
    mesh = jax.sharding.Mesh(devices, "data")

    def on_device(params, windows):
        # Each device its own copy: else the gradient would be summed over devices,
        # leaf by leaf, before anybody asks.
        params = jax.lax.pcast(params, "data", to="varying")
        return jax.lax.pmean(of_shard(params, windows), "data")

    everyone, rows = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(everyone, rows), out_specs=everyone
    )
