"""Traffic, memory and operations of one device in a compiled, sharded training step.

Programs are compiled from shapes, without memory for arrays. The devices are virtual
CPU devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.models import ModelConfig, param_shapes
from jaxkv.parallel import find_collectives
from scaling.costs import Layout, Traffic, training_traffic
from scaling.shapes import describe_config
from scaling.training import (
    StepConfig,
    divided_gradient,
    make_training_mesh,
    tree_specs,
)

FLOAT32_BYTES = 4
"""Bytes of an activation, weight or gradient: float32."""


class DeviceCounts(NamedTuple):
    """Counts of one device in a compiled training step."""

    params: float
    """Numbers among the program's arguments, without tokens."""
    sent_bytes: float
    """Bytes sent by collectives, without counters and flags."""
    flops: float
    """Operations counted by XLA, which counts a loop body once."""
    kept_bytes: float
    """Peak bytes in addition to parameters and gradients: activations."""


def count_compiled(
    shape: ModelConfig, layout: Layout, *, batch: int, sequence: int
) -> DeviceCounts:
    """Compiles the gradient of a step and returns its counts.

    Args:
      shape: model.
      layout: parallel layout.
      batch: sequences over all devices.
      sequence: tokens of each sequence.
    """
    mesh = make_training_mesh(layout)
    param_tree = param_shapes(shape)
    params = jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree_specs(shape, layout, mesh, param_tree),
        param_tree,
    )
    windows = jax.ShapeDtypeStruct(
        (batch, sequence + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec()),
    )
    gradient = divided_gradient(shape, StepConfig(layout=layout))
    program: Any = jax.jit(gradient).lower(params, windows).compile()
    memory = program.memory_analysis()
    param_bytes = memory.argument_size_in_bytes - 4 * windows.size
    return DeviceCounts(
        params=param_bytes / FLOAT32_BYTES,
        sent_bytes=collective_bytes(program),
        flops=float(program.cost_analysis()["flops"]),
        kept_bytes=float(memory.temp_size_in_bytes),
    )


def collective_bytes(program: jax.stages.Compiled) -> float:
    """Returns the bytes that a device sends by the collectives of a program."""
    collectives = find_collectives(str(program.as_text()))
    return sum(collective.sent(rank=1) for collective in collectives)


def predicted_traffic(
    shape: ModelConfig, layout: Layout, *, batch: int, sequence: int
) -> tuple[Traffic, ...]:
    """Returns the traffic of a training step according to the formulas.

    Args:
      shape: model.
      layout: parallel layout.
      batch: sequences over all devices.
      sequence: tokens of each sequence.
    """
    return training_traffic(
        describe_config(shape),
        layout,
        batch=batch // layout.data,
        sequence=sequence,
        number_bytes=FLOAT32_BYTES,
        gradient_bytes=FLOAT32_BYTES,
    )
