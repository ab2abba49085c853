"""What a function that is being traced will run on."""

import re
from typing import NamedTuple

import jax

_HOPPER = re.compile(r"\b(H20|H100|H200|H800|GH200)\b")


class Target(NamedTuple):
    """A kind of device.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: as the device calls itself, for example "NVIDIA H200".
      num_cores: multiprocessors of a GPU; 1 where it does not say.
    """

    platform: str
    kind: str
    num_cores: int


def current() -> Target:
    """Tells the target of a trace: a device of the mesh that is set, else the default.

    So a program that is lowered for a device which is not there asks for the right one.
    """
    there = jax.sharding.get_abstract_mesh().abstract_device
    if there is not None and there.platform is not None:
        return Target(there.platform, there.device_kind, there.num_cores or 1)
    device = jax.devices()[0]
    num_cores = getattr(device, "core_count", None) or 1
    return Target(device.platform, device.device_kind, num_cores)


def why_not_hopper(target: Target) -> str | None:
    """Says in a clause why kernels for Hopper do not run on it, or None."""
    if target.platform == "gpu" and _HOPPER.search(target.kind):
        return None
    return f"it needs a Hopper GPU (compute capability 9.0), not {target.kind!r}"
