"""What a device of a mesh sends, holds and computes in a training step, compiled.

From shapes alone: nothing is allocated, and the devices are those that a CPU plays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.models import ModelConfig, transformer
from jaxkv.parallel import collectives
from scaling.costs import traffic
from scaling.costs.parallelism import Layout
from scaling.shapes import from_model
from scaling.training import StepConfig, meshes, parallel

NUMBER_BYTES = 4
"""Of activations, weights and gradients: float32."""


class DeviceCounts(NamedTuple):
    """Of one device."""

    params: float
    """Numbers that the program is given, tokens left out."""
    sent_bytes: float
    """By its collectives, counters and flags left out."""
    flops: float
    """That XLA counts, a loop's body once."""
    kept_bytes: float
    """At once beside parameters and gradients, at most: activations."""


def count_compiled(
    shape: ModelConfig, layout: Layout, *, batch: int, sequence: int
) -> DeviceCounts:
    """Compiles a step's gradient, `batch` sequences over all devices."""
    mesh, whole = meshes.make_mesh(layout), transformer.param_shapes(shape)
    params = jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        meshes.specs(shape, layout, mesh, whole),
        whole,
    )
    windows = jax.ShapeDtypeStruct(
        (batch, sequence + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec()),
    )
    gradient = parallel.gradient(shape, StepConfig(layout=layout))
    program: Any = jax.jit(gradient).lower(params, windows).compile()
    memory = program.memory_analysis()
    given = memory.argument_size_in_bytes - 4 * windows.size
    return DeviceCounts(
        params=given / NUMBER_BYTES,
        sent_bytes=collective_bytes(program),
        flops=float(program.cost_analysis()["flops"]),
        kept_bytes=float(memory.temp_size_in_bytes),
    )


def collective_bytes(program: Any) -> float:
    """Bytes that a device sends by a compiled program's collectives."""
    found = collectives.collectives(str(program.as_text()))
    return sum(each.sent(rank=1) for each in found)


def predicted_traffic(
    shape: ModelConfig, layout: Layout, *, batch: int, sequence: int
) -> tuple[traffic.Traffic, ...]:
    """What it sends by the formulas, `batch` sequences over all devices."""
    return traffic.training(
        from_model.describe(shape),
        layout,
        batch=batch // layout.data,
        sequence=sequence,
        number_bytes=NUMBER_BYTES,
        gradient_bytes=NUMBER_BYTES,
    )
