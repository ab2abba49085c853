"""The gradient of a training step, on one device or divided by a `Layout`.

Every kind of parallelism is in one `jax.shard_map`: each device runs the forward pass
on its part of the parameters and of the tokens. JAX tracks whether a value varies over
mesh axes, and sums gradients over the axes along which a parameter is replicated: in
the backward pass, Megatron's all-reduces. Gradients of devices with different tokens
are summed at the end, once a step; if moments are divided (ZeRO), each device gets its
part of the sum.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxkv.models import Params
from jaxkv.parallel import RING, ULYSSES, zigzag_order
from scaling.training import meshes, objectives, pipeline
from scaling.training.recipes import StepConfig
from scaling.training.recurrent import Architecture

type Gradient = Callable[
    [Params, Int[Array, "batch window"]], tuple[Float[Array, ""], Params]
]
"""Returns the mean nats of windows, and the gradient of the objective."""


def divided_gradient(
    model: Architecture,
    how: StepConfig,
    objective: objectives.TrainingObjective = objectives.NEXT_TOKEN,
) -> Gradient:
    """Returns a function for the mean nats of windows and the gradient.

    Parameters are divided by `meshes.place_training_tree` for `how.layout`; windows may
    have any placement. The gradient, in float32, has the sharding of the parameters, or
    with `zero` that of the optimizer's moments. A pipeline supports the next-token
    objective only. The gradient of a selection bias is the load of its experts.
    """
    layout = how.layout
    mean = functools.partial(_mean, objective)
    if layout.pipeline > 1:
        mean = pipeline.pipeline_gradient
    if layout.num_devices == 1:
        return lambda params, windows: mean(
            model, how, params, windows[:, :-1], windows[:, 1:]
        )
    mesh = meshes.make_training_mesh(layout)
    copies = meshes.batch_axes(layout)
    along = tuple(x for x in copies if x in (RING, ULYSSES))
    batch = tuple(x for x in copies if x not in along)
    rows = PartitionSpec(batch or None, along or None)
    undivided = dataclasses.replace(layout, zero=0)

    def divided(params: Params, windows: Array) -> tuple[Array, Params]:
        order = zigzag_order(windows.shape[1] - 1, ring=layout.ring)
        specs = meshes.tree_specs(model, undivided, mesh, params)
        grad_specs = meshes.tree_specs(model, layout, mesh, params)

        def of_device(
            params: Params, tokens: Array, targets: Array
        ) -> tuple[Array, Params]:
            # Parameters are cast to varying: otherwise gradients would be summed leaf
            # by leaf for each piece.
            params = jax.tree.map(
                lambda x, axes: lax.pcast(x, axes, to="varying") if axes else x,
                params,
                _replication_axes(params, specs, copies),
            )
            nats, grads = mean(model, how, params, tokens, targets)
            grads = jax.tree.map(
                _summed,
                grads,
                _replication_axes(grads, specs, copies),
                specs,
                grad_specs,
            )
            num = math.prod(mesh.shape[name] for name in copies)
            return (
                lax.pmean(nats, copies) if copies else nats,
                jax.tree.map(lambda x: x / np.float32(num), grads),
            )

        run = jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(specs, rows, rows),
            out_specs=(PartitionSpec(), grad_specs),
        )
        return run(params, windows[:, :-1][:, order], windows[:, 1:][:, order])

    return divided


class _Axes(tuple[str, ...]):
    """Names of axes, a leaf of a tree."""


def _replication_axes(params: Params, specs: Params, copies: tuple[str, ...]) -> Params:
    """Returns the axes of `copies` along which each parameter is replicated."""
    return jax.tree.map(
        lambda _, spec: _Axes(name for name in copies if name not in spec),
        params,
        specs,
    )


def _summed(
    x: Float[Array, "..."],
    axes: _Axes,
    param_spec: PartitionSpec,
    grad_spec: PartitionSpec,
) -> Float[Array, "..."]:
    """Sums a gradient over the devices that replicate the parameter."""
    if not axes:
        return x
    for place, names in enumerate(grad_spec):
        if names != (param_spec[place] if place < len(param_spec) else None):
            return lax.psum_scatter(x, axes, scatter_dimension=place, tiled=True)
    return lax.psum(x, axes)


def _mean(
    objective: objectives.TrainingObjective,
    model: Architecture,
    how: StepConfig,
    params: Params,
    tokens: Array,
    targets: Array,
) -> tuple[Float[Array, ""], Params]:
    """Returns one device's mean nats and gradient, accumulated over pieces."""

    def plain(
        params: Params, tokens: Array, targets: Array
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return objective(
            how.cast(params), tokens, targets, model=model, layout=how.layout
        )

    # Operations that are cheap next to products are recomputed.
    policy = jax.checkpoint_policies.dots_saveable
    loss = jax.checkpoint(plain, policy=policy) if how.remat else plain
    of_piece = jax.value_and_grad(loss, has_aux=True)
    if how.accumulation == 1:
        (_, nats), grads = of_piece(params, tokens, targets)
        return nats, grads

    def add(
        total: tuple[Array, Params], piece: tuple[Array, Array]
    ) -> tuple[tuple[Array, Params], None]:
        (_, nats), grads = of_piece(params, *piece)
        return jax.tree.map(jnp.add, total, (nats, grads)), None

    zeros = meshes.zero_like(targets), jax.tree.map(jnp.zeros_like, params)
    cut = functools.partial(jnp.reshape, shape=(how.accumulation, -1, tokens.shape[1]))
    total, _ = lax.scan(add, zeros, (cut(tokens), cut(targets)))
    return jax.tree.map(lambda x: x / np.float32(how.accumulation), total)
