"""Fast compilation of smoke runs, which test function and not speed."""

import importlib.util
import os
import sys
from collections.abc import MutableMapping

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
