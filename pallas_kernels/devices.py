"""What a function that is being traced will run on."""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
from jax import lax
from jaxtyping import Array

HOPPER = "9.0"
"""Compute capability of GPUs that the Mosaic kernels are for: H100 and H200."""
NUM_CORES = 132
"""Multiprocessors of an H100 or H200."""
SMEM_BYTES = 232_448
"""Shared memory that a kernel may ask for there."""
L2_BYTES = {"NVIDIA H200": 62_914_560, "NVIDIA H100 80GB HBM3": 52_428_800}
"""Last cache before memory: a cold measurement passes over several times as much."""
WGMMA_ROWS = 64
"""Rows of one product of the tensor cores."""
LINE_BYTES = 128
"""A line of the layout in which the tensor cores read and the copy engine moves."""
GROUP_THREADS = 128
"""Threads of a warpgroup, each with as many elements of an array."""
ROW_ALIGNMENT = 8
"""Rows that the copy engine counts in."""

COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
    ),
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_triton_gemm": False,
}
"""What a program asks of the compiler on a GPU: everything captured as a CUDA graph,
loops and branches whose trips are data, too, from one launch on; and products by
cuBLASLt, which adds residuals. Elsewhere they mean nothing."""

_HOPPER_NAMES = re.compile(r"\b(H20|H100|H200|H800|GH200)\b")


class Target(NamedTuple):
    """A kind of device.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: as the device calls itself, for example "NVIDIA H200".
      num_cores: multiprocessors of a GPU; 1 where it does not say.
      capability: CUDA compute capability of a GPU, "" where it is not known.
    """

    platform: str
    kind: str
    num_cores: int
    capability: str


def current_target() -> Target:
    """Tells the target of a trace: a device of the mesh that is set, else the default.

    So a program that is lowered for a device which is not there asks for the right one.
    A mesh knows names only, and of those only Hopper's are known here.
    """
    there = jax.sharding.get_abstract_mesh().abstract_device
    if there is not None and there.platform is not None:
        kind = there.device_kind
        capability = HOPPER if _HOPPER_NAMES.search(kind) else ""
        return Target(there.platform, kind, there.num_cores or 1, capability)
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
    """Names the implementation that serves a call of an operation that has two.

    Args:
      implementation: "reference", "mosaic_gpu", or None for the best that works.
      refusal: says in a clause why the Mosaic kernel does not take the call on a
        Hopper GPU, or None.

    Raises:
      ValueError: one is asked for that is unknown, or that cannot serve the call.
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
    """Says in a clause why kernels for Hopper do not run on it, or None."""
    if target.platform != "gpu":
        return f"the device is a {target.platform}, not a GPU"
    if target.capability != HOPPER:
        return f"the GPU has compute capability {target.capability}, not {HOPPER}"
    return None


def varying_like(x: Array, *others: Array) -> Array:
    """The same numbers, typed as if they differed wherever `others` do on a mesh.

    Inside `jax.shard_map` what a loop carries must be of one type from the start.
    """
    axes = frozenset[str]().union(*(_axes(each) for each in others))
    missing = tuple(sorted(axes - _axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _axes(x: Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
