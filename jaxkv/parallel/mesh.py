"""Meshes: devices in an order, by the kind of parallelism that each axis is for."""

import contextlib
import math
import os

import jax
from jax.sharding import AxisType, Mesh

from jaxkv import validation
from jaxkv.memory.page_parts import CONTEXT
from jaxkv.models.partition import EXPERT, TENSOR
from jaxkv.parallel import processes


def set_cpu_devices(num: int) -> None:
    """Has a CPU count as `num` devices at least, where JAX has not started yet.

    Where there are several processes, all their devices together.
    """
    num = -(-num // processes.num())
    if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user said how many
    if (jax.config.values["jax_num_cpu_devices"] or 1) < num:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num)


@validation.suggests_keywords
def make_mesh(*, tensor: int = 1, context: int = 1, expert: int = 1) -> Mesh:
    """A mesh of the first `tensor * context * expert` devices, for an engine.

    Args:
      tensor: devices that divide heads, the MLP's columns and the vocabulary among
        them, at least 1.
      context: devices, or groups of `tensor`, that divide every page among them, so
        that each has a part of every sequence, at least 1.
      expert: those that divide experts among them, at least 1.

    Raises:
      ValueError: there are not so many devices.
    """
    degrees = {CONTEXT: context, EXPERT: expert, TENSOR: tensor}
    for name, degree in degrees.items():
        validation.integer(name, degree, low=1)
    axes = {name: x for name, x in degrees.items() if x > 1 or name == TENSOR}
    num, asked = math.prod(axes.values()), [f"{k}={v}" for k, v in axes.items()]
    if num > (there := len(jax.devices())):
        raise ValueError(
            f"{' times '.join(asked)} must be in [1, {there}], the devices that are "
            "there; a CPU counts as many as "
            f"jax.config.update('jax_num_cpu_devices', {num}) says"
        )
    processes.check_all_used(num)
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[:num],
    )
