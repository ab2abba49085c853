"""The device that a traced function will run on, and choice of implementations."""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jaxtyping import Array

HOPPER = "9.0"
"""Compute capability of H100 and H200, the GPUs of the Mosaic kernels."""
NUM_CORES = 132
"""Multiprocessors of an H100 or H200."""
SMEM_BYTES = 232_448
"""Shared memory that a block may use on Hopper."""
L2_BYTES = {"NVIDIA H200": 62_914_560, "NVIDIA H100 80GB HBM3": 52_428_800}
"""L2 cache; a cold measurement moves several times as much between two calls."""
WGMMA_ROWS = 64
"""Rows of one tensor-core product (wgmma)."""
LINE_BYTES = 128
"""Line of the swizzled layout that tensor cores read and TMA copies."""
GROUP_THREADS = 128
"""Threads of a warpgroup."""
ROW_ALIGNMENT = 8
"""Row granularity of TMA copies."""

type Ref = Any
"""A reference to memory, or a barrier, inside a kernel. JAX traces references as
objects that its own annotations do not cover."""

COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
    ),
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_triton_gemm": False,
}
"""XLA flags for programs on a GPU: everything is captured in CUDA graphs, including
loops and branches with data-dependent trip counts, from one launch on; products use
cuBLASLt, which fuses the addition of residuals. Other platforms ignore the flags."""

_HOPPER_NAMES = re.compile(r"\b(H20|H100|H200|H800|GH200)\b")


class Target(NamedTuple):
    """A kind of device.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the device's own name, such as "NVIDIA H200".
      num_cores: multiprocessors of a GPU; 1 if unknown.
      capability: CUDA compute capability of a GPU, "" if unknown.
    """

    platform: str
    kind: str
    num_cores: int
    capability: str


def current_target() -> Target:
    """Returns the target of a trace: a device of the set mesh, or the default device.

    A program that is lowered for an absent device thus gets that device. A mesh has
    device names only, and only those of Hopper GPUs imply a compute capability.
    """
    device_of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    if device_of_mesh is not None and device_of_mesh.platform is not None:
        kind = device_of_mesh.device_kind
        capability = HOPPER if _HOPPER_NAMES.search(kind) else ""
        return Target(
            device_of_mesh.platform, kind, device_of_mesh.num_cores or 1, capability
        )
    device = jax.devices()[0]
    return Target(
        platform=device.platform,
        kind=device.device_kind,
        num_cores=int(getattr(device, "core_count", None) or 1),
        capability=str(getattr(device, "compute_capability", None) or ""),
    )


def choose_implementation(
    implementation: str | None, refusal: Callable[[], str | None]
) -> Literal["reference", "mosaic_gpu"]:
    """Returns the implementation that computes a call.

    Args:
      implementation: "reference", "mosaic_gpu", or None for the best supported one.
      refusal: returns why the Mosaic kernel does not support the call on a Hopper GPU,
        or None.

    Raises:
      ValueError: the requested implementation is unknown or does not support the call.
    """
    if implementation not in (None, "reference", "mosaic_gpu"):
        raise ValueError(f"{implementation=} must be None, 'reference' or 'mosaic_gpu'")
    if implementation == "reference":
        return "reference"
    reason = hopper_unsupported_reason(current_target()) or refusal()
    if reason is None:
        return "mosaic_gpu"
    if implementation == "mosaic_gpu":
        raise ValueError(f"{implementation=}: {reason}; 'reference' takes it")
    return "reference"


def hopper_unsupported_reason(target: Target) -> str | None:
    """Returns why the Hopper kernels do not run on a target, or None if they do."""
    if target.platform != "gpu":
        return f"the device is a {target.platform}, not a GPU"
    if target.capability != HOPPER:
        return f"the GPU has compute capability {target.capability}, not {HOPPER}"
    return None


def varying_like(x: Array, *others: Array) -> Array:
    """Returns x with the type of an array that varies over the mesh axes of `others`.

    Inside `jax.shard_map` the carry of a loop must have one type from the start.
    """
    axes = frozenset[str]().union(*(_axes(other) for other in others))
    missing = tuple(sorted(axes - _axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _axes(x: Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
