"""Compiles programs for H200s without a GPU: kernel resources, memory, copies.

The compiler is the one that a GPU machine runs, so registers, spills, shared memory,
instructions and XLA's memory plan are exact. Speed is not measured: matrix products
outside the kernels are not autotuned. Warnings about nvdisasm on standard error are
harmless, because no machine code is read.
"""

import contextlib
import importlib.util
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

_TARGET_FILE = Path(__file__).parents[1] / "h200.txtpb"
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_cuda13_plugin")
_TOOLKITS = ("/usr/local/cuda",)
_DRIVER = Path("/dev/nvidiactl")
"""Device file that exists where NVIDIA's driver is loaded."""
_LIBDEVICE = Path("nvvm", "libdevice", "libdevice.10.bc")
_INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b",
    "tma_load": r"\bcp\.async\.bulk\.(tensor\.\dd\.)?shared::\w+\.global\b",
    "tma_store": r"\bcp\.async\.bulk\.(tensor\.\dd\.)?global\.shared::cta\b",
    "barrier_wait": r"\bmbarrier\.try_wait\b",
}


class KernelReport(NamedTuple):
    """Resources of one compiled Mosaic GPU kernel.

    Attributes:
      name: name of the kernel and a number.
      registers: registers of each thread at the launch.
      spill_stores: bytes of registers that a thread spills to memory.
      spill_loads: bytes of spilled registers that a thread reads back.
      smem_bytes: shared memory of a block, at most `devices.SMEM_BYTES`.
      instructions: numbers of selected instructions in the code: `wgmma` (matrix
        products), `tma_load` and `tma_store` (bulk copies), `barrier_wait`.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    smem_bytes: int
    instructions: dict[str, int]


class CompileReport(NamedTuple):
    """Resources of a compiled program, per device.

    Attributes:
      kernels: its Mosaic GPU kernels, each once however often it is called.
      temp_bytes: memory for temporaries, without arguments and results.
      alias_bytes: results that reuse the memory of a donated argument.
      text: the optimized HLO; a copy is a line with ` copy(`.
    """

    kernels: tuple[KernelReport, ...]
    temp_bytes: int
    alias_bytes: int
    text: str


def load_compiler() -> None:
    """Makes JAX load the CUDA compiler of `.venv/deviceless` without a GPU.

    Changes `sys.path`, and on a machine without a GPU also JAX's configuration, so it
    must be called before JAX initializes its devices. A compiler that is installed in
    the environment itself, and settings that are already made, are left unchanged.
    """
    folder = Path(sys.prefix, "deviceless")
    if not _is_installed(_PLUGINS[0]) and folder.is_dir():
        sys.path.append(str(folder))
    if not _DRIVER.exists():
        # JAX would look for a GPU's libraries, and drop the plugin without them.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        if not jax.config.values["jax_platforms"]:
            jax.config.update("jax_platforms", "cpu")


def unavailable_reason() -> str | None:
    """Returns why this machine cannot compile for an H200, or None if it can.

    Checks files only. Without libdevice the compiler would end the process.
    """
    if any(not _is_installed(name) for name in _PLUGINS):
        return (
            "jax's CUDA plugin is not installed; `make setup DEVICELESS=1` puts one "
            "into .venv/deviceless"
        )
    if _toolkit() is None:
        return (
            "no CUDA toolkit with bin/ptxas and nvvm/libdevice in CUDA_HOME, in the "
            "packages nvidia-cuda-nvcc and nvidia-nvvm, or in /usr/local/cuda"
        )
    return None


def make_h200_mesh(axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the H200s of one host; the last axis varies fastest.

    Raises:
      RuntimeError: the compiler is not available, see `unavailable_reason`.
    """
    if (reason := unavailable_reason()) is not None:
        raise RuntimeError(f"cannot compile for an H200: {reason}")
    sizes = tuple(axes.values())
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=_TARGET_FILE.read_text("utf-8"),
            # Slices of hosts, hosts of a slice, devices of a host.
            topology=f"1x1x{math.prod(sizes)}",
        )
    except NotImplementedError:
        raise RuntimeError(
            "cannot compile for an H200: JAX started its devices without the CUDA "
            "plugin; call deviceless.load_compiler() before, in a new process"
        ) from None
    return topologies.make_mesh(topo=topology, mesh_shape=sizes, axis_names=tuple(axes))


def compile_function(
    function: Callable[..., object],
    *args: PyTree[Array | np.ndarray | jax.ShapeDtypeStruct],
    donate_argnums: int | Sequence[int] = (),
    options: Mapping[str, bool | int | float | str] | None = None,
    mesh: Mesh | None = None,
) -> CompileReport:
    """Compiles a function for one H200, or for several.

    Args:
      function: function of arrays; it is jitted here.
      args: its arguments, pytrees of objects with a shape and a dtype. On a mesh, an
        argument with a `NamedSharding` is sharded, and any other is replicated.
      donate_argnums: arguments whose memory the results may reuse.
      options: compiler flags.
      mesh: a mesh of `make_h200_mesh`; None means one device.

    Returns:
      Resources of the program.

    Raises:
      RuntimeError: the compiler is not available, see `unavailable_reason`.
    """
    mesh = make_h200_mesh({"device": 1}) if mesh is None else mesh
    replicated = NamedSharding(mesh, PartitionSpec())

    def place_on_device(
        x: Array | np.ndarray | jax.ShapeDtypeStruct,
    ) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        sharding = (
            sharding
            if isinstance(sharding, NamedSharding) and sharding.mesh == mesh
            else replicated
        )
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shapes = jax.tree.map(place_on_device, args)
    jitted = jax.jit(function, donate_argnums=donate_argnums)
    # `devices.current_target` reads the mesh that is set.
    with _dumping() as folder, _without_program_cache(), jax.set_mesh(mesh):
        program = jitted.lower(*shapes).compile(dict(options or {}))
        kernels = tuple(_read_kernel(path) for path in sorted(folder.glob("*.ptxas")))
    text = program.as_text()
    memory = program.memory_analysis()
    assert text is not None
    assert memory is not None
    if "mosaic_gpu" in text and not kernels:
        raise RuntimeError("the compiler dumped no report of the program's kernels")
    return CompileReport(
        kernels, memory.temp_size_in_bytes, memory.alias_size_in_bytes, text
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package around it
        return False


def _toolkit() -> Path | None:
    """Returns the folder of a CUDA toolkit with ptxas and libdevice, or None."""
    folders = [os.environ["CUDA_HOME"]] if "CUDA_HOME" in os.environ else []
    if _is_installed("nvidia.cu13"):
        spec = importlib.util.find_spec("nvidia.cu13")
        assert spec is not None
        folders += spec.submodule_search_locations or []
    for folder in map(Path, (*folders, *_TOOLKITS)):
        has_ptxas = (folder / "bin" / "ptxas").exists() or shutil.which("ptxas")
        if has_ptxas and (folder / _LIBDEVICE).exists():
            return folder
    return None


@contextlib.contextmanager
def _dumping() -> Generator[Path]:
    """Sets the variables that make the compiler dump kernel reports to a new folder.

    Mosaic reads these variables at each compilation; it has no other interface.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "CUDA_HOME": str(_toolkit()),
            "MOSAIC_GPU_DUMP_TO": folder,
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        with mock.patch.dict(os.environ, wanted):
            yield Path(folder)


@contextlib.contextmanager
def _without_program_cache() -> Generator[None]:
    """Disables the persistent cache, which cannot be read back without a GPU."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _read_kernel(path: Path) -> KernelReport:
    """Reads the reports of the assembler and of Mosaic about one kernel."""
    said = path.read_text("utf-8")
    resources = path.with_suffix(".resources.txt").read_text("utf-8")
    ptx = path.with_suffix(".ptx").read_text("utf-8")

    def total(pattern: str, text: str) -> int:
        return sum(int(number) for number in re.findall(pattern, text))

    return KernelReport(
        name=path.stem,
        registers=max(int(x) for x in re.findall(r"Used (\d+) registers", said)),
        spill_stores=total(r"(\d+) bytes spill stores", said),
        spill_loads=total(r"(\d+) bytes spill loads", said),
        smem_bytes=total(r"\bsmem_scratch_bytes=(\d+)", resources),
        instructions={
            name: len(re.findall(pattern, ptx))
            for name, pattern in _INSTRUCTIONS.items()
        },
    )
