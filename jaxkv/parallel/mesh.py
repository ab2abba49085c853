"""Meshes: devices in an order, by the kind of parallelism that each axis is for."""

import contextlib
import os

import jax
from jax.sharding import AxisType, Mesh

from jaxkv import validation
from jaxkv.models.partition import TENSOR
from jaxkv.parallel import processes


def count_cpu_as(num: int) -> None:
    """Has a CPU count as `num` devices at least, where JAX has not started yet.

    Where there are several processes, all their devices together.
    """
    num = -(-num // processes.num())
    if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user said how many
    if (jax.config.values["jax_num_cpu_devices"] or 1) < num:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num)


def make_mesh(*, tensor: int = 1) -> Mesh:
    """A mesh of the first devices.

    Args:
      tensor: devices that divide heads, the MLP's columns and the vocabulary among
        them, at least 1.

    Raises:
      ValueError: there are not so many devices.
    """
    validation.integer("tensor", tensor, low=1)
    if tensor > (there := len(jax.devices())):
        raise ValueError(
            f"{tensor=} must be in [1, {there}], the devices that are there; a CPU "
            f"counts as many as jax.config.update('jax_num_cpu_devices', {tensor}) says"
        )
    processes.check_all_used(tensor)
    return jax.make_mesh(
        (tensor,),
        (TENSOR,),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:tensor],
    )
