"""Compiled programs, kept from one command to the next, and how they are compiled."""

import importlib.util
import os
import re
import sys
from collections.abc import MutableMapping

from jaxkv import files

MIN_COMPILE_TIME_S = 0.2
"""Programs that compile faster are not worth a file."""
COMPILE_BOUND = frozenset(
    {
        *("bench_decode", "bench_device", "bundled_heads", "demo", "experts"),
        *("isoflop", "jacobi", "learning_rate"),
        *("speculation", "speculation_zoo"),
    }
)
"""Experiments whose smoke run takes 40 to 90 s of processor time, most of it to compile
programs for a CPU; without optimisation it takes about half. Simulations are not among
them: their steps take longer than their compilation."""
_FAST = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # XLA's newer emitters set up a compiler for each kernel.
    "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
}


def enable_program_cache(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes JAX keep what it compiles, so that a second start takes a fraction.

    To be called before jax is imported; whoever has set a folder, or imported jax by
    then, is not overruled. The folder is `jaxkv` under `$XDG_CACHE_HOME` or `~/.cache`
    and may be deleted at any time.

    Args:
      environ: the environment to change.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return
    environ["JAX_COMPILATION_CACHE_DIR"] = str(files.cache_folder(environ))
    environ.setdefault(
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(MIN_COMPILE_TIME_S)
    )


def disable_optimization(
    name: str, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Makes JAX compile the smoke run of an experiment without optimisation.

    Such a run asks whether everything works, not how fast it is. Programs for a GPU,
    and flags that a user has set, are left as they are.

    Args:
      name: of the experiment.
      environ: the environment to change, before jax is imported.
    """
    has_gpu = any(map(importlib.util.find_spec, _GPU_PLUGINS))
    if name in COMPILE_BOUND and not has_gpu and "jax" not in sys.modules:
        for variable, value in _FAST.items():
            environ.setdefault(variable, value)


_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin")


def explain_cache_warning(
    warning: str, environ: MutableMapping[str, str] = os.environ
) -> str:
    """Says what is to be done where JAX cannot keep programs, or read those kept.

    Args:
      warning: any warning; another one is given back.
      environ: the environment that names the folder.

    Returns:
      A line that is the same for all programs.
    """
    if not re.match("Error (reading|writing) persistent compilation cache", warning):
        return warning
    folder = environ.get("JAX_COMPILATION_CACHE_DIR", "the cache of compiled programs")
    system = re.search(r"\[Errno \d+\] ([^:]*)", warning)
    reason = system[1] if system else "what is there is broken"
    return (
        f"{folder}: no place for compiled programs: {reason}; every start compiles "
        "anew, until it is deleted or JAX_COMPILATION_CACHE_DIR names another folder"
    )
