"""Device meshes with an axis for each kind of parallelism."""

import contextlib
import math
import os

import jax
from jax.sharding import AxisType, Mesh

from jaxkv import validation
from jaxkv.memory import CONTEXT
from jaxkv.models import EXPERT, TENSOR
from jaxkv.parallel import processes


@validation.checks_numbers()
def set_cpu_devices(num: int) -> None:
    """Makes JAX split a CPU into at least `num` devices, if it has not started yet.

    With several processes, `num` is the number of devices of all processes.
    """
    num = -(-num // processes.num_processes())
    if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has set the number
    if (jax.config.values["jax_num_cpu_devices"] or 1) < num:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num)


@validation.suggests_keywords
def make_mesh(*, tensor: int = 1, context: int = 1, expert: int = 1) -> Mesh:
    """Makes a mesh of the first `tensor * context * expert` devices, for an engine.

    Args:
      tensor: number of devices that divide heads, MLP columns and vocabulary, at least
        1.
      context: number of devices, or tensor-parallel groups, that divide every page, so
        that each has a part of every sequence, at least 1.
      expert: number of devices or groups that divide experts, at least 1.

    Raises:
      ValueError: there are too few devices.
    """
    degrees = {CONTEXT: context, EXPERT: expert, TENSOR: tensor}
    for name, degree in degrees.items():
        validation.integer(name, degree, low=1)
    axes = {name: x for name, x in degrees.items() if x > 1 or name == TENSOR}
    num = math.prod(axes.values())
    axis_sizes = [f"{k}={v}" for k, v in axes.items()]
    if num > (num_available := len(jax.devices())):
        raise ValueError(
            f"{' times '.join(axis_sizes)} must be in [1, {num_available}], the "
            "available devices; jax.config.update('jax_num_cpu_devices', "
            f"{num}) splits a CPU"
        )
    processes.check_all_used(num)
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[:num],
    )
