"""Persistent cache of compiled programs, and fast compilation of smoke runs."""

import importlib.util
import os
import re
import sys
from collections.abc import MutableMapping

from jaxkv import files

MIN_COMPILE_TIME_S = 0.2
"""Compile time below which a program is not cached, in s."""
COMPILE_BOUND = frozenset(
    {
        *("bench_decode", "bench_device", "bundled_heads", "demo", "experts"),
        *("deepseek", "isoflop", "jacobi", "learning_rate"),
        *("speculation", "speculation_zoo"),
    }
)
"""Experiments whose smoke run takes 40 to 90 s of processor time, most of it
compilation for a CPU; without optimization it takes about half. Simulations are not
included: their steps take longer than their compilation."""
_FAST = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # XLA's newer emitters set up a compiler for each kernel.
    "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
}


def enable_program_cache(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes JAX cache compiled programs on disk, so that a second start is faster.

    Must be called before jax is imported. Has no effect if a cache folder is already
    set. The folder is `jaxkv` under `$XDG_CACHE_HOME` or `~/.cache` and may be deleted
    at any time.

    Args:
      environ: environment to change.
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
    """Makes JAX compile the smoke run of an experiment without optimization.

    A smoke run tests function and not speed. Programs for a GPU, and flags set by the
    user, are not changed.

    Args:
      name: name of the experiment.
      environ: environment to change, before jax is imported.
    """
    has_gpu = any(map(importlib.util.find_spec, _GPU_PLUGINS))
    if name in COMPILE_BOUND and not has_gpu and "jax" not in sys.modules:
        for variable, value in _FAST.items():
            environ.setdefault(variable, value)


_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin")


def explain_cache_warning(
    warning: str, environ: MutableMapping[str, str] = os.environ
) -> str:
    """Returns a remedy for a warning that JAX cannot read or write its cache.

    Args:
      warning: any warning; a warning about another subject is returned unchanged.
      environ: environment with the cache folder.

    Returns:
      One line, equal for all programs.
    """
    if not re.match("Error (reading|writing) persistent compilation cache", warning):
        return warning
    folder = environ.get("JAX_COMPILATION_CACHE_DIR", "the cache of compiled programs")
    system = re.search(r"\[Errno \d+\] ([^:]*)", warning)
    reason = system[1] if system else "its files are damaged"
    return (
        f"{folder}: cannot cache compiled programs: {reason}; every start compiles "
        "again until it is deleted or JAX_COMPILATION_CACHE_DIR names another folder"
    )
