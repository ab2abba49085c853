"""A training step's gradient, divided over a mesh as a `Layout` says.

Data, tensor, Megatron's sequence, Ulysses and ring parallelism in one `jax.shard_map`:
each device runs the forward pass on its part of the parameters and of the tokens.
JAX knows of every value whether devices differ in it, and sums gradients over those
axes along which a parameter is the same: backward the all-reduces of Megatron's f, and
those of data parallelism.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxkv.models import ModelConfig, Params, transformer
from jaxkv.models.partition import TENSOR
from jaxkv.parallel import sequence, tensor
from scaling.costs import parallelism
from scaling.costs.parallelism import Layout
from scaling.shapes import from_model
from scaling.training import dense_forward, objectives, pipeline

DATA = "data"
"""The axis of the mesh that divides a batch."""


def check(config: ModelConfig, layout: Layout, *, sequence_length: int) -> None:
    """Refuses what cannot be trained so.

    Raises:
      ValueError: names what does not divide, or what is not implemented.
    """
    if layout.expert > 1 or layout.zero:
        raise ValueError(f"{layout=} must have expert 1 and zero 0")
    if layout.pipeline > 1 and layout.context > 1:
        raise ValueError(f"{layout=} must have pipeline or ring and ulysses, not both")
    if config.experts is not None:
        raise ValueError(f"{config.experts=} must be None under a layout")
    if config.num_kv_heads % layout.tensor:
        # Copies of a head would be trained apart.
        raise ValueError(
            f"{config.num_kv_heads=} must be a multiple of tensor={layout.tensor}"
        )
    if layout.ring > 1 and config.window is not None:
        raise ValueError(f"{config.window=} must be None in a ring")
    parallelism.check(from_model.describe(config), layout, sequence=sequence_length)
    sequence.order(sequence_length, ring=layout.ring)


def make_mesh(layout: Layout) -> Mesh:
    """The first devices, by axes of the degrees above 1; tensor varies fastest.

    Raises:
      ValueError: there are not so many devices.
    """
    axes = {
        DATA: layout.data,
        pipeline.PIPELINE: layout.pipeline,
        sequence.RING: layout.ring,
        sequence.ULYSSES: layout.ulysses,
        TENSOR: layout.tensor,
    }
    axes = {name: size for name, size in axes.items() if size > 1} or {DATA: 1}
    if layout.num_devices > (there := len(jax.devices())):
        raise ValueError(
            f"{layout} asks for {layout.num_devices} devices, {there} are there"
        )
    return jax.make_mesh(
        *(tuple(axes.values()), tuple(axes)),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: layout.num_devices],
    )


def param_specs(config: ModelConfig, mesh: Mesh) -> Params:
    """How each parameter is divided."""
    is_axes = lambda x: type(x) is tuple  # noqa: E731

    staged = pipeline.PIPELINE in mesh.shape

    def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
        found = tuple(tensor.spec_of(axes) if TENSOR in mesh.shape else ())
        if "layers" in axes:
            found = (pipeline.PIPELINE, *found[1:])
        return PartitionSpec(*found)

    axes = transformer.param_axes(config, stacked=staged)
    return jax.tree.map(spec, axes, is_leaf=is_axes)


def place_params(config: ModelConfig, params: Params, mesh: Mesh) -> Params:
    """Divides parameters; a vocabulary that does not divide ends in zeros.

    Layers are stacked where stages divide them.
    """
    degree = mesh.shape.get(TENSOR, 1)
    fitted = jax.tree_util.tree_map_with_path(
        lambda path, x: tensor.fit_array(
            tuple(key.key for key in path), np.asarray(x), config, degree
        ),
        params,
    )
    if pipeline.PIPELINE in mesh.shape:
        fitted = transformer.stack_layers(config, fitted)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), param_specs(config, mesh)
    )
    return jax.device_put(fitted, shardings)


def gradient(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    *,
    num_micro: int = 1,
    schedule: Literal["gpipe", "1f1b"] = "1f1b",
) -> Callable[[Params, Int[Array, "batch window"]], tuple[Float[Array, ""], Params]]:
    """What gives the mean nats of windows and their gradient, every device its part.

    Parameters are those of `place_params`; windows may lie anywhere. With stages a
    device's windows are divided into `num_micro` micro-batches, see `pipeline`.
    """
    over = tuple(
        name for name in (DATA, sequence.RING, sequence.ULYSSES) if name in mesh.shape
    )
    along = tuple(name for name in over if name != DATA)
    rows = PartitionSpec(DATA if DATA in over else None, along or None)
    specs = param_specs(config, mesh)
    if layout.pipeline > 1:
        how: Any = {"num_micro": num_micro, "kind": schedule, "over": over}
        staged = pipeline.gradient(config, layout, mesh, specs, **how)
        return lambda params, windows: staged(params, windows[:, :-1], windows[:, 1:])

    def of_part(params: Params, tokens: Array, targets: Array) -> Any:
        num = tokens.size * math.prod(mesh.shape[name] for name in over)

        def loss(params: Params) -> Array:
            # Each device its own copy: one sum for a parameter, however often it is
            # used.
            params = lax.pcast(params, over, to="varying") if over else params
            logits = dense_forward.logits(params, tokens, config=config, layout=layout)
            nats = objectives.divided_nats(logits, targets, num_words=config.vocab_size)
            return nats.sum() / jnp.asarray(num, nats.dtype)

        # Differentiated before it is summed: the sum's own gradient is sent by nobody.
        found, grads = jax.value_and_grad(loss)(params)
        return lax.psum(found, over) if over else found, grads

    run = jax.shard_map(
        of_part,
        mesh=mesh,
        in_specs=(specs, rows, rows),
        out_specs=(PartitionSpec(), specs),
    )

    def gradient(params: Params, windows: Array) -> tuple[Array, Params]:
        order = sequence.order(windows.shape[1] - 1, ring=layout.ring)
        return run(params, windows[:, :-1][:, order], windows[:, 1:][:, order])

    return gradient
